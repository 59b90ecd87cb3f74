"""Parts whose manager is ended from outside, at any moment: they end with it, and no name is left.

The fixture `deployment_name` looks for processes and names when a test is over.
"""

from __future__ import annotations

import os
import signal

import pytest

pytestmark = pytest.mark.timeout(120)

KILLED_AT_START = """
import asyncio, os, signal, sys
from manager import Settings, TokenizerManager
async def work():
    manager = TokenizerManager(Settings(name=sys.argv[1], workers=2), engine="ngram")
    await manager.start()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(work())
"""

IN_A_GROUP_OF_ITS_OWN = """
import os, sys
os.setsid()
os.execv(sys.executable, [sys.executable, "-m", "manager", *sys.argv[1:]])
"""


def test_parts_of_a_manager_that_was_killed_while_they_started_do_not_wait_for_another(
    deployment_name, commands, until
):
    """They would serve the next deployment of that name, with the wrong engine."""
    killed = commands.python("-c", KILLED_AT_START, deployment_name)
    assert killed.wait() == -signal.SIGKILL
    after = commands.manager("generate", "--name", deployment_name, "--engine", "echo", "hello")
    assert after.wait() == 0, after.err
    assert after.out == "hello\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_the_whole_group_leaves_nothing(deployment_name, commands, until, number):
    """A closed terminal, or a service manager's stop, would leave megabytes behind each time."""
    options = ["--max-new-tokens", "null", "--ignore-eos", "--context-length", "1000000"]
    generate = commands.python(
        "-c", IN_A_GROUP_OF_ITS_OWN, "generate", "--name", deployment_name, *options, "Once"
    )
    until(lambda: generate.out, "text comes")
    os.killpg(generate.pid, number)
    code = generate.wait()
    assert code == (-number if number == signal.SIGQUIT else 128 + number)
    assert "Traceback" not in generate.err


def test_closed_standard_input_is_told_in_one_line(deployment_name, commands):
    """A service without a terminal would hang for ever."""
    close_first = "import os, sys; os.close(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    generate = commands.python("-c", close_first, "-m", "manager", "generate", "--name", deployment_name)
    assert generate.wait() == 1
    assert "error: standard input is closed" in generate.err
    assert "Traceback" not in generate.err


def test_a_prompt_that_can_never_fit_is_not_tokenized(deployment_name, commands):
    """Encoding it would take a minute and keep everybody else's prompts waiting."""
    length = 64 * 16 + 1
    generate = commands.manager("generate", "--name", deployment_name, "--context-length", "16", "x" * length)
    assert generate.wait() == 1
    assert f"text is too long for the context: characters={length}, max={64 * 16}" in generate.err
