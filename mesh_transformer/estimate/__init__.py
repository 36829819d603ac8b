"""What a compiled program costs on an accelerator that is not attached: its time, its memory, its collectives."""
