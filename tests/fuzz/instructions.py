"""Examples of instruction data, as JSON lines."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from support.chat_templates import chat_folder
from support.mutations import mutated_bytes, mutated_json

from fuzz.harness import Attempt
from fuzz.templates import CHAT, TOOLS
from mesh_transformer.data.chat.instructions import InstructionEncoder
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.dataset.inputs import read_inputs
from mesh_transformer.dataset.parts import Bad, examples, plan

EXAMPLES = [
    {"messages": CHAT[:2]},
    {"messages": CHAT, "tools": TOOLS},
    {"prompt": "a question", "completion": " an answer\n"},
    {"instruction": "add", "input": "1 2", "output": "3"},
]


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Encodes the examples of a file with mutated lines, with and without a chat template."""
    path = folder / "a.jsonl"
    with ExitStack() as stack:
        names = (str(chat_folder(folder / "chat")), "bytes")
        encoders = [stack.enter_context(InstructionEncoder(load_tokenizer(name))) for name in names]

        def attempt(random: Random) -> str:
            lines = [mutated_json(random, random.choice(EXAMPLES), EXAMPLES).replace(b"\n", b" ") for _ in range(2)]
            content = b"".join(line + b"\n" for line in lines)
            path.write_bytes(mutated_bytes(random, content) if random.random() < 0.1 else content)
            encoder, bad = random.choice(encoders), False
            for part in plan(read_inputs([str(path)]), 1 << 20, None):
                for row in examples(part):
                    if isinstance(row, Bad):
                        bad = True
                        continue
                    tokens = encoder.encode(row.example)
                    assert tokens.ids.shape == tokens.learned.shape
            return "bad" if bad else "read"

        yield attempt
