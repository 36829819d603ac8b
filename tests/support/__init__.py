"""What tests share: stand-ins, builders, references, and programs that tests start."""
