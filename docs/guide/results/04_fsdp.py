"""Compile GPT-J-6B with FSDP for a slice that is not attached, and write what chapter 4 of the guide reads.

    pip install -e '.[tpu]'
    python docs/guide/results/04_fsdp.py

It writes 04_fsdp.json: the result of preflight.py and the longest operations of the program. This takes some minutes of
CPU time.
"""

from preflight_result import compiled, write

COMMAND = (
    "preflight.py --config configs/6B_finetune_v3-8.json --tpu v5e-16 --set mesh.tp=1 --set mesh.fsdp=16"
    " --set data.per_replica_batch=2 --set optimizer.gradient_accumulation_steps=1 --set compute.remat=save_attn"
)

if __name__ == "__main__":
    write(__file__, compiled(COMMAND))
