"""JAXformer's model beside a model of the same shape with DeepSeek's latent attention, on tiny Shakespeare: the same
tokens, steps and learning rates. Both train on fsdp 2 x pp 2 x tp 2, which are eight virtual CPU devices.

python benchmarks/jaxformer_against_mla.py [--seeds N] [--steps N] [--pictures FOLDER]
"""

from common import report
from experts_against_dense import compare

MODELS = {
    "jaxformer": ("configs/jaxformer_tiny_shakespeare.json", []),
    "mla": ("configs/jaxformer_mla_tiny_shakespeare.json", []),
}

if __name__ == "__main__":
    report(compare(__doc__, MODELS, seeds=1))
