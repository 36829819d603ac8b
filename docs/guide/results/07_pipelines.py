"""Compile GPT-J-6B in four stages for a slice that is not attached, and write what chapter 7 of the guide reads.

    pip install -e '.[tpu]'
    python docs/guide/results/07_pipelines.py

It writes 07_pipelines.json: the result of preflight.py and the longest operations of the program. This takes some
minutes of CPU time.
"""

from preflight_result import compiled, write

COMMAND = (
    "preflight.py --config configs/6B_finetune_v3-8.json --tpu v4-16 --set mesh.pp=4 --set mesh.tp=2"
    " --set mesh.shard_activations=true --set optimizer.gradient_accumulation_steps=16"
)

if __name__ == "__main__":
    write(__file__, compiled(COMMAND))
