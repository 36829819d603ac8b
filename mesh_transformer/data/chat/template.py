"""Chat templates: messages to text. A template is a Jinja program from a stranger, so a process with limits runs it."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

from mesh_transformer.data.chat import template_process
from mesh_transformer.data.chat.template_process import TIME_S, WALL_S
from mesh_transformer.errors import UserError

# the environment variables that Python needs to start; any further one may be a secret
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ")
# the end of a message that is continued: its text alone may stand in what the template writes after it
_MARK = "END_OF_CONTINUED_MESSAGE "
# a message of a chat, as the template gets it: role, content and other fields
Message = Mapping[str, Any]


# a tool that the assistant may call: {"type": "function", "function": {"name", "description", "parameters"}}
Tool = Mapping[str, Any]


class ToolsNotUsed(UserError):
    """A template would leave the tools out of the prompt."""


class ChatTemplate:
    """The chat template of a tokenizer. Only one thread at a time may use it.

    The process starts with the first text, and again after one that exceeded its limits. `template_process.py` has the
    limits of time, memory and length, and the names that a template may use.

    Args:
        source: the template, in Jinja.
        variables: what it may use besides the messages, such as `bos_token`.
        tool_source: the template for chats with tools. None: `source`.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], tool_source: str | None = None):
        self._source, self._variables = source, variables
        self._tool_source = tool_source
        self._uses_tools: bool | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat, with the names of special tokens, as transformers' `apply_chat_template` gives it.

        Args:
            messages: from the oldest to the newest.
            add_generation_prompt: end with the beginning of the assistant's next message.
            continue_final_message: end with the text of the last message, so that the model continues it.
            tools: what the assistant may call.
            variables: further ones, such as `enable_thinking`.

        Raises:
            ToolsNotUsed: there are tools, and the template does not use them.
            UserError: the template refuses the messages, has a fault or exceeds a limit; or the last message, which is
                to be continued, has no text, or the template leaves it out.
        """
        given = _marked(messages) if continue_final_message else messages
        text = self._answer(self._request(given, add_generation_prompt, tools, variables))["text"]
        return _until_mark(text) if continue_final_message else text

    def render_answers(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text of a whole chat, and where the assistant's text is: first character and stop of each place.

        The template marks these places with {% generation %}; None for a template without such marks.

        Raises:
            ToolsNotUsed, UserError: as `render`; or the template makes text that is not Unicode.
        """
        answer = self._answer({**self._request(messages, False, tools, None), "answers": True})
        marked = answer["answers"]
        return answer["text"], None if marked is None else [(first, stop) for first, stop in marked]

    def _request(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        source = self._source
        if tools is not None:
            source = source if self._tool_source is None else self._tool_source
            if self._uses_tools is None:
                self._uses_tools = "tools" in self._answer({"source": source})["names"]
            if not self._uses_tools:
                raise ToolsNotUsed("the chat template of this model does not use tools: leave the field out")
        arguments = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        given = {"documents": None, **self._variables, **(variables or {}), **arguments}
        return {"source": source, "variables": given}

    def close(self) -> None:
        """End the process. The next text starts another one."""
        if self._process is not None:
            # not by the end of its input, which a stopped process does not see
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._ask(request)
        if "error" in answer:
            raise UserError(
                f"the chat template of this model cannot make a prompt of these messages: {answer['error']}"
            )
        return answer

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        # without its limits a program from a stranger is not run
        if importlib.util.find_spec("resource") is None:
            return {"error": "this operating system does not limit the memory and time of a template"}
        process = self._process = self._running()
        to, back = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        overdue = threading.Event()

        def end() -> None:
            overdue.set()
            process.kill()

        # ends the waits for the process below
        timer = threading.Timer(WALL_S, end)
        timer.start()
        # if the process has ended, there is no answer
        with contextlib.suppress(BrokenPipeError):
            to.write(json.dumps(request).encode() + b"\n")
            to.flush()
        answer = back.readline()
        timer.cancel()
        timer.join()
        if overdue.is_set() or not answer.endswith(b"\n"):
            self.close()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if overdue.is_set():
            return {"error": f"it takes longer than {WALL_S:g} s by the clock"}
        late = process.returncode == -signal.SIGPROF
        return {"error": f"it takes longer than {TIME_S:g} s" if late else "its process ended unexpectedly"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        # -P: modules beside the program do not hide modules of Python
        command = [sys.executable, "-P", template_process.__file__]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages, with a mark at the end of the content of the last one.

    Raises:
        UserError: it has no text.
    """
    *before, final = messages
    if not final["content"].strip():
        raise UserError("the last message cannot be continued: it has no text")
    return [*before, {**final, "content": final["content"] + _MARK}]


def _until_mark(text: str) -> str:
    """The part of a chat's text before the mark, as transformers' `continue_final_message` gives it: a template that
    removes the blank at the end of the mark would remove those at the end of the content."""
    place = text.rfind(_MARK.rstrip())
    if place < 0:
        raise UserError("the last message cannot be continued: the chat template leaves it out")
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()
