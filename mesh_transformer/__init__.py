"""Train, fine-tune and sample GPT-J-class transformers in Haiku, sharded over any device mesh.

Importing this package imports nothing heavy: no jax, no numpy. Import the sub-module that you need.
"""

__version__ = "2.0.0"
