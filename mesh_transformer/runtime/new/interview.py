"""The answers to the questions of `mesh-transformer new`: from options, and from the terminal."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator

from mesh_transformer import environment
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.new import answers
from mesh_transformer.runtime.new.answers import QUESTIONS, Answers


class Interview:
    """The answers so far.

    Args:
        name: the name of the run.
        texts: the answers of the options, by name.
        more: the other options of the command.
    """

    def __init__(self, name: str, texts: dict[str, str], more: tuple[str, ...] = ()):
        self._name, self._more = name, more
        # in the order of the questions
        self.texts = {question: texts[question] for question in QUESTIONS if question in texts}
        self._asked = False

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Interview":
        """The answers among the parsed arguments.

        Raises:
            UserError: the name of the run or an answer is not valid.
        """
        answers.check_name(given.name, given.overwrite)
        texts = {name: value for name in QUESTIONS if (value := getattr(given, name)) is not None}
        for name, text in texts.items():
            texts[name] = answers.checked(name, text, texts)
        price = () if given.price is None else ("--price", f"{given.price:.15g}")
        return cls(given.name, texts, (*price, *["--overwrite"] * given.overwrite))

    @property
    def interactive(self) -> bool:
        """Whether there is a terminal to ask on."""
        return sys.stdin.isatty()

    @property
    def command(self) -> str:
        """The command line with these answers."""
        flags = [word for name in QUESTIONS if name in self.texts for word in (f"--{name}", self.texts[name])]
        return shlex.join([environment.PROGRAM, "new", self._name, *flags, *self._more])

    def complete(self) -> None:
        """Ask the questions that no option answers.

        Raises:
            UserError: there is no terminal, or the input ends.
        """
        missing = [name for name in QUESTIONS if name not in self.texts]
        if missing and not self.interactive:
            options = " ".join(f"--{name} {name.upper()}" for name in missing)
            raise UserError(f"no terminal to ask on: give {options}")
        for name in missing:
            self.ask(name)

    def ask(self, name: str) -> None:
        """Ask a question, again if it has an answer."""
        self._asked = True
        self.texts.pop(name, None)
        self.texts[name] = answers.ask(name, self.texts)
        if name == "goal" and "model" in self.texts:
            answers.checked("model", self.texts["model"], self.texts)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Say how to go on with what was answered, if the command ends inside the context."""
        try:
            yield
        except (UserError, KeyboardInterrupt):
            if self._asked and self.texts:
                sys.stdout.write(f"\nTo go on: {self.command}\n")
            raise

    def answers(self) -> Answers:
        """The answers, which are complete."""
        texts = self.texts
        return Answers(
            goal=answers.goal(texts["goal"]),
            model=texts["model"].strip(),
            data=texts["data"].strip(),
            hardware=answers.hardware(texts["hardware"]),
            budget=answers.budget(texts["budget"]),
        )
