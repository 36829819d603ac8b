"""What the tests of the documentation's commands read, run and refuse."""

from pathlib import Path

import pytest

from support import doc_blocks, doc_shell
from support.doc_blocks import Block
from support.doc_output import missing

PAGE = """# A page

Save this as `numbers.txt`:

    1
    2

Then

    export NAME=value         # a comment
    $ cat numbers.txt \\
      numbers.txt

    1
    2

```python
import sys
```

- A list:

      python -m pytest

```mermaid
flowchart
```

The last text

    is a text
"""


def of(text: str, tmp_path: Path) -> list[Block]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return doc_blocks.blocks(tmp_path, page)


def test_the_blocks_of_a_page(tmp_path):
    found = of(PAGE, tmp_path)
    assert [(block.kind, block.text) for block in found] == [
        ("file", "1\n2"),
        ("command", "export NAME=value"),
        ("command", "cat numbers.txt numbers.txt"),
        ("python", "import sys"),
        ("command", "python -m pytest"),
        ("text", "is a text"),
    ]
    assert (found[0].name, found[2].printed, found[2].line) == ("numbers.txt", ["1", "2"], 11)


@pytest.mark.parametrize(
    ("printed", "output", "same"),
    [
        ("step 20, loss 2.83", "12:00 step 20, loss 2.85", True),
        ("step 20, loss 2.83", "12:00 step 20, loss 3.83", False),
        ("step 20, loss 2.83", "12:00 step 21, loss 2.83", False),
        ("reached ... in 5.1 s at 1,200 tokens/s", "reached it in 71 s at 3 tokens/s", True),
        ("a  b", "a b", True),
        ("a (b)", "a b", False),
    ],
)
def test_the_output_of_a_page(printed, output, same):
    assert (missing([printed], f"first\n{output}\n") is None) == same


def test_lines_have_the_order_of_the_page():
    assert missing(["a", "", "b"], "a\nbetween\nb") is None
    assert missing(["a", "b"], "b\na") == "b"


def run(text: str, tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    doc_shell.run(of(text, tmp_path), tmp_path / "checkout", tmp_path / "logs", 60)


def test_a_page_is_one_shell(tmp_path):
    """Files, variables and the current folder stay for later commands and programs."""
    program = "```python\nimport os\nprint(os.environ['NAME'], os.getcwd())\n```\n"
    end = '    mkdir -p folder && cd folder\n    bash -c "pwd"\n\n    .../checkout/folder\n'
    run(f"{PAGE.partition('- A list')[0]}\n{end}\n{program}", tmp_path)
    assert (tmp_path / "logs/06").read_text() == f"value {tmp_path}/checkout/folder\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cat absent.txt", "exit code 1"),
        ("bash -c 'echo one'\n\n    two", "the page has the line\ntwo\nbut the command printed\none"),
        ("bash -c 'echo the run is complete: step 1'", "it finds a finished run and does nothing"),
        ("cat absent.txt\n    ls /", "exit code 1"),
    ],
)
def test_a_command_that_fails_is_found(command, message, tmp_path):
    with pytest.raises(AssertionError, match=message):
        run(f"A page\n\n    {command}\n", tmp_path)
