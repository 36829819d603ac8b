"""Compile a training step with sequences of 131,072 tokens for a slice that is not attached, and write what chapter 6
of the guide reads.

    pip install -e '.[tpu]'
    python docs/guide/results/06_slice.py

It writes 06_slice.json: the result of preflight.py and the longest operations of the program. This takes some minutes
of CPU time.
"""

from preflight_result import COLUMNS, compiled, write

COMMAND = (
    "preflight.py --config configs/llama_8B.json --tpu v5p-128 --set model.seq=131072 --set data.per_replica_batch=1"
    " --set compute.remat=save_attn --set mesh.cp=16 --set mesh.fsdp=4 --set mesh.tp=1"
    " --set mesh.shard_activations=false --set mesh.context_mode=zigzag"
)

if __name__ == "__main__":
    write(__file__, compiled(COMMAND, (*COLUMNS, "flops")))
