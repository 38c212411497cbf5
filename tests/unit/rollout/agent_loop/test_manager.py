# SPDX-License-Identifier: Apache-2.0
"""Whole conversations over a scripted engine: tokens, masks, limits, reasons and traces."""

import asyncio
import json
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import ConfigError, RolloutError, WeightSyncError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards.outcome import Outcome
from quadriga.rollout import Completion, generate_sequences
from quadriga.rollout.agent_loop import AgentLoop, Conversation, register

ADD = '''
@function_tool
def add(a: int, b: int, *, bonus: int = 0) -> int:
    """Add two numbers."""
    return a + b + bonus
'''
CALL = 'to: <tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'
Converse = Callable[..., DataProto]


def _rows(output: DataProto, name: str) -> list[Any]:
    return list(output.non_tensor_batch[name])


def _responses(output: DataProto, tokenizer: Any) -> list[str]:
    """The responses as text; what the model wrote stands in brackets."""
    batch, texts = output.batch, []
    length = batch["responses"].shape[1]
    for row in range(len(output)):
        valid = batch["attention_mask"][row, -length:].bool()
        ids, mask = (
            batch["responses"][row][valid].tolist(),
            batch["response_mask"][row][valid].tolist(),
        )
        text, before = "", 0
        for token, written in zip(ids, mask, strict=True):
            text += (
                "[" if written > before else "]" if written < before else ""
            ) + tokenizer.decode([token])
            before = written
        texts.append(text + ("]" if before else ""))
    return texts


def test_training_sees_what_the_engine_saw(
    converse, make_prompts, recorder, tool_file, tokenizer
) -> None:
    """Every prompt of the engine is a prefix of the row, token for token, and every answer stands where it was given.

    The model writes "to", "ol" and "42" letter by letter, which the tokenizer would merge: tokens that were made
    anew from text would differ. It does not prove that an engine computes with what it is given.
    """
    letters = [token for letter in CALL for token in tokenizer(letter)["input_ids"]]
    assert letters != tokenizer(CALL)["input_ids"]
    end = tokenizer.eos_token_id
    answers = iter([[*letters, end], [*letters], [*tokenizer("42")["input_ids"], end]])
    engine = recorder(lambda prompt: next(answers))
    output = converse(engine, make_prompts(["40 and 2?"]), {"function_tool_path": tool_file(ADD)})

    row, length = output.batch, output.batch["responses"].shape[1]
    whole = row["input_ids"][0][row["attention_mask"][0].bool()].tolist()
    assert len(engine.seen) == 3
    for prompt, answer, _ in engine.seen:
        assert whole[: len(prompt) + len(answer)] == prompt + answer
    assert whole == engine.seen[-1][0] + engine.seen[-1][1]
    # What the model wrote, and nothing else, is learned from.
    written = [token for _, answer, _ in engine.seen for token in answer]
    assert row["responses"][0][row["response_mask"][0].bool()].tolist() == written
    assert torch.equal(row["rollout_log_probs"], -row["response_mask"].float())
    tool = "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    (text,) = _responses(output, tokenizer)
    assert text == f"[{CALL}<|im_end|>]\n{tool}[{CALL}]<|im_end|>\n{tool}[42<|im_end|>]"
    assert row["position_ids"][0, -length - 1 :].diff().eq(1).all()
    assert _rows(output, "num_turns") == [5] and _rows(output, "finish_reason") == ["stop"]
    metrics = output.meta_info["metrics"]
    assert metrics["rollout/num_response_tokens"].value == len(written)
    assert metrics["rollout/num_tool_calls"].value == 2


def test_thoughts_stay(converse, make_prompts, recorder, tool_file, tokenizer) -> None:
    """The template would drop the thoughts of an earlier answer; the conversation keeps its tokens."""
    engine = recorder({"Tools": ["<think>hm</think>" + CALL, "done"]})
    output = converse(engine, make_prompts(["40 and 2?"]), {"function_tool_path": tool_file(ADD)})
    assert "<think>hm</think>" in tokenizer.decode(engine.seen[1][0])
    assert _responses(output, tokenizer)[0].startswith("[<think>hm</think>to: ")


def test_one_turn_equals_the_batch(converse, make_prompts, recorder, tokenizer) -> None:
    """`single_turn_agent` gives every column of `generate_sequences` but the times, seeds included."""
    prompts = make_prompts(["a", "b", "a longer one"], length=100, meta_info={"global_steps": 3})
    answers = ["x", "yes and no", "z"]
    together, apart = recorder(answers), recorder(answers)
    lengths = {"prompt_length": 100, "T": 5}
    output = converse(apart, prompts, mode="async", **lengths)
    expected = generate_sequences(
        together,
        prompts,
        config=RolloutConfig(),
        response_length=5,
        pad_token_id=tokenizer.pad_token_id,
        seed=1,
    )
    assert set(expected.batch.keys()) - {"rollout_times"} == set(output.batch.keys())
    for name in output.batch.keys():
        assert torch.equal(expected.batch[name], output.batch[name]), name
    assert [params.seed for *_, params in apart.seen] == [
        params.seed for *_, params in together.seen
    ]
    assert _rows(output, "finish_reason") == ["stop", "length", "stop"]
    for name in (
        "rollout/num_prompt_tokens",
        "rollout/num_response_tokens",
        "rollout/length_share",
    ):
        assert output.meta_info["metrics"][name] == expected.meta_info["metrics"][name]


def test_each_turn_has_a_seed_of_its_own(converse, make_prompts, recorder, tool_file) -> None:
    """Else a model at work would draw the same numbers in every turn."""
    engine = recorder([CALL, "done"])
    converse(engine, make_prompts(["40 and 2?"]), {"function_tool_path": tool_file(ADD)})
    first, second = (params.seed for *_, params in engine.seen)
    assert first != second


def test_tools_kwargs(converse, make_prompts, recorder, tool_file, tokenizer) -> None:
    """A sample sets what the model does not see; a wrong name stops the run and says where it stands."""
    path = tool_file(ADD)
    given = [{"add": {"execute_kwargs": {"bonus": 100}}}, {"add": None}]
    engine = recorder({"tool\n": "done", "Tools": CALL})
    output = converse(
        engine, make_prompts(["a", "b"], tools_kwargs=given), {"function_tool_path": path}
    )
    assert ["\n142<" in text for text in _responses(output, tokenizer)] == [True, False]
    assert "bonus" not in tokenizer.decode(engine.seen[0][0])
    with pytest.raises(
        RolloutError, match="tools_kwargs: got ad, expected names of tools: add"
    ) as raised:
        converse(
            engine, make_prompts(["a"], tools_kwargs=[{"ad": {}}]), {"function_tool_path": path}
        )
    assert raised.value.__notes__ == ["in the conversation of row 0, uid u0, turn 0"]


def test_a_failing_tool_ends_its_own_sample(
    converse, make_prompts, recorder, tool_file, tokenizer, caplog
) -> None:
    """The others go on; the reason names tool, arguments and error; the row ends with the model's own words."""
    path = tool_file(
        '''
@function_tool
def half(of: int) -> int:
    """Half of a number."""
    if of % 2:
        raise ValueError("odd")
    return of // 2
'''
    )
    call = '<tool_call>{"name": "half", "arguments": {"of": %d}}</tool_call>'
    engine = recorder({"tool\n": "done", "of 3": call % 3, "of 4": call % 4})
    with caplog.at_level(logging.WARNING):
        output = converse(
            engine, make_prompts(["half of 3", "half of 4"]), {"function_tool_path": path}
        )
    failed, went_on = _responses(output, tokenizer)
    assert failed == f"[{call % 3}<|im_end|>]"
    assert went_on.endswith("[done<|im_end|>]")
    reasons = _rows(output, "finish_reason")
    assert (
        reasons[0].startswith('tool_error: half({"of": 3}): got ValueError: odd')
        and reasons[1] == "stop"
    )
    assert "1 of 2 conversations failed. The first, row 0: tool_error: half" in caplog.text
    assert output.meta_info["metrics"]["rollout/num_failures"].value == 1


def test_nothing_but_failures_stops_the_run(converse, make_prompts, recorder, tool_file) -> None:
    """A tool that never works is not a matter of samples."""
    path = tool_file(
        '@function_tool\ndef add(a: int, b: int) -> int:\n    """Adds."""\n    raise OSError("no disk")\n'
    )
    with pytest.raises(
        RolloutError, match=r"64 conversations in a row that failed.*OSError: no disk"
    ):
        converse(recorder([CALL]), make_prompts(["x"] * 64), {"function_tool_path": path})


def test_mistakes_of_the_model_are_answered(
    converse, make_prompts, recorder, tool_file, tokenizer
) -> None:
    """No JSON, an unknown name, wrong arguments: the model reads what is wrong, and can do better."""
    engine = recorder(
        [
            "<tool_call>{add}</tool_call>",
            '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>',
            CALL,
            "42",
        ]
    )
    config = {"function_tool_path": tool_file(ADD), "max_tool_response_length": 256}
    output = converse(engine, make_prompts(["40 and 2?"]), config, T=2500)
    (text,) = _responses(output, tokenizer)
    for expected in (
        "is not JSON",
        "got the name 'sub', expected one of add",
        "b: Field required",
        "\n42<|im_end|>",
    ):
        assert expected in text
    assert _rows(output, "finish_reason") == ["stop"]
    assert output.meta_info["metrics"]["rollout/num_refused_calls"].value == 3


def test_parallel_calls(converse, make_prompts, recorder, tool_file, tokenizer) -> None:
    """So many calls of a turn are made side by side, answered in their order; the others are refused."""
    path = tool_file(
        '''
@function_tool
async def wait(s: float) -> str:
    """Wait."""
    await asyncio.sleep(s)
    return f"waited {s}"
'''
    )
    call = '<tool_call>{"name": "wait", "arguments": {"s": 0.5}}</tool_call>'
    calls = "".join(call.replace("0.5", number) for number in ("0.6", "0.5", "0.4"))
    output = converse(
        recorder([calls, "done"]),
        make_prompts(["wait"]),
        {"function_tool_path": path, "max_parallel_calls": 2},
        T=900,
    )
    (text,) = _responses(output, tokenizer)
    assert (
        text.index("waited 0.6")
        < text.index("waited 0.5")
        < text.index("only 2 calls of a turn are made")
    )
    assert "waited 0.4" not in text
    assert 0.6 <= output.meta_info["metrics"]["timing_s/tools"].value < 1.05


def test_a_tool_answer_that_does_not_fit(
    converse, make_prompts, recorder, tool_file, tokenizer
) -> None:
    """The conversation ends with the model's words: neither a part of the answer nor the answer alone is of use."""
    path, room = tool_file(ADD), len(tokenizer(CALL)["input_ids"]) + 1
    whole = len(tokenizer("\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    for length in (room + 5, room + whole):
        output = converse(
            recorder([CALL, "42"]), make_prompts(["?"]), {"function_tool_path": path}, T=length
        )
        assert _responses(output, tokenizer) == [f"[{CALL}<|im_end|>]"]
        assert _rows(output, "finish_reason") == ["length"] and _rows(output, "num_turns") == [1]
    output = converse(
        recorder([CALL, "42"]),
        make_prompts(["?"]),
        {"function_tool_path": path},
        T=room + whole + 1,
    )
    assert _responses(output, tokenizer)[0].endswith("[42]") or _responses(output, tokenizer)[
        0
    ].endswith("[4]")
    assert _rows(output, "num_turns") == [3]


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [
        ({"max_assistant_turns": 2}, "max_assistant_turns", 3),
        ({"max_user_turns": 2}, "max_user_turns", 5),
    ],
)
def test_limits_on_turns(
    converse, make_prompts, recorder, tool_file, tmp_path, limits: dict, reason: str, num_turns: int
) -> None:
    """A tool is not called for a turn that must not come; the model has the last word."""
    log = tmp_path / "calls"
    path = tool_file(
        ADD.replace("    return", f"    open({str(log)!r}, 'a').write('.')\n    return")
    )
    output = converse(
        recorder([CALL]), make_prompts(["?"]), {"function_tool_path": path, **limits}, T=900
    )
    assert _rows(output, "finish_reason") == [reason] and _rows(output, "num_turns") == [num_turns]
    assert len(log.read_text()) == num_turns // 2
    assert (
        output.batch["response_mask"][0][output.batch["attention_mask"][0, -900:].bool()][-1] == 1
    )


def test_a_prompt_that_its_tools_make_too_long(
    converse, make_prompts, recorder, tool_file, tokenizer
) -> None:
    """It ends its own sample: no token is generated, the reason says the lengths."""
    prompts = make_prompts(["short"], length=80)
    output = converse(
        recorder(["x"]), prompts, {"function_tool_path": tool_file(ADD)}, prompt_length=80
    )
    (reason,) = _rows(output, "finish_reason")
    assert reason.startswith("prompt_length: ") and reason.endswith(
        "with 1 tools, over data.max_prompt_length=80"
    )
    assert not output.batch["response_mask"].any()
    assert torch.equal(output.batch["prompts"], prompts.batch["input_ids"])


def test_what_the_data_must_bring(converse, make_prompts, recorder, tool_file) -> None:
    """Tools are rendered into the prompt out of its messages."""
    prompts = make_prompts(["?"])
    prompts.pop(non_tensor_batch_keys=["raw_prompt"])
    with pytest.raises(RolloutError, match=r"column raw_prompt\. Set data\.return_raw_chat=True"):
        converse(recorder(["x"]), prompts, {"function_tool_path": tool_file(ADD)})


class Dying:
    """An engine that dies with its third request, while another one is on its way."""

    weight_version = 0

    def __init__(self, tokenizer: Any) -> None:
        self.answer, self.num, self.given_up = tokenizer(CALL)["input_ids"], 0, 0

    async def generate(
        self, prompt_token_ids: Any, sampling: Any, images: Any = None
    ) -> Completion:
        self.num += 1
        if self.num == 3:
            raise RolloutError("engine", got="a dead process")
        try:
            await asyncio.sleep(60 if self.num > 3 else 0)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return Completion(self.answer, [0.0] * len(self.answer), "stop", 0)


def test_an_engine_that_dies(converse, make_prompts, tool_file, tokenizer, tmp_path) -> None:
    """Its error reaches the caller with the conversation it hit; the others are given up; what was said is on disk."""
    engine = Dying(tokenizer)
    with pytest.raises(RolloutError, match="a dead process") as raised:
        converse(engine, make_prompts(["a", "b", "c", "d"]), {"function_tool_path": tool_file(ADD)})
    assert raised.value.__notes__ == ["in the conversation of row 2, uid u2, turn 0"]
    assert engine.given_up >= 1


class Aborting:
    """An engine that gives up whatever it is asked, the second time without a token."""

    weight_version = 0

    def __init__(self, first: list[int]) -> None:
        self.answers = [
            Completion(first, [0.0] * len(first), "stop", 0),
            Completion([], [], "abort", 0),
        ]

    async def generate(
        self, prompt_token_ids: Any, sampling: Any, images: Any = None
    ) -> Completion:
        return self.answers.pop(0)


def test_an_aborted_turn(converse, make_prompts, tool_file, tokenizer) -> None:
    """What was said stays; the tool's answer that nobody read does not."""
    engine = Aborting(tokenizer(CALL)["input_ids"])
    output = converse(engine, make_prompts(["?"]), {"function_tool_path": tool_file(ADD)})
    assert _responses(output, tokenizer) == [f"[{CALL}]"]
    assert _rows(output, "finish_reason") == ["abort"]


def test_stale_weights(converse, make_prompts, recorder) -> None:
    """An engine of another version is an error."""
    with pytest.raises(WeightSyncError, match="version 7"):
        converse(recorder(["x"]), make_prompts(["?"], meta_info={"weight_version": 7}))


USER = """
class Teacher(Interaction):
    def __init__(self, patience: int) -> None:
        self.patience = patience

    async def start_interaction(self, answer: str, method: str = "") -> None:
        self.answer = answer

    def generate_response(self, messages):
        if self.answer in messages[-1]["content"]:
            return Reply(score=1.0, is_over=True)
        self.patience -= 1
        return Reply("Try again.", score=0.25, is_over=self.patience == 0)
"""


def test_a_user_simulator(converse, make_prompts, recorder, tool_file, tokenizer, tmp_path) -> None:
    """It answers as the user, scores each turn, and ends the conversation; samples without one have no such turn."""
    tool_file(USER, "teacher.py")
    (tmp_path / "users.yaml").write_text(
        "interaction:\n  - {name: teacher, class_name: teacher.py:Teacher, config: {patience: 2}}\n"
    )
    engine = recorder({"Try again": "It is 42.", "?": "It is 41."})
    kwargs = [
        {"name": "teacher", "answer": "42", "method": "by hand"},
        {"name": "teacher", "answer": "43"},
        {"name": None},
    ]
    config = {"interaction_config_path": str(tmp_path / "users.yaml")}
    output = converse(engine, make_prompts(["?", "?", "?"], interaction_kwargs=kwargs), config)
    turn = "[It is 41.<|im_end|>]\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n[It is 42.<|im_end|>]"
    assert _responses(output, tokenizer) == [turn, turn, "[It is 41.<|im_end|>]"]
    assert _rows(output, "turn_scores") == [[0.25, 1.0], [0.25, 0.25], []]
    assert _rows(output, "finish_reason") == ["interaction", "interaction", "stop"]
    with pytest.raises(
        RolloutError, match=r"interaction_kwargs\.name: got 'pupil', expected one of teacher"
    ):
        converse(engine, make_prompts(["?"], interaction_kwargs=[{"name": "pupil"}]), config)


def test_a_user_simulator_that_fails(converse, make_prompts, recorder, tool_file, tmp_path) -> None:
    """Its kwargs do not fit: the sample ends and the reason says which method."""
    tool_file(USER, "teacher.py")
    path = tmp_path / "users.yaml"
    path.write_text(
        "interaction:\n  - {name: teacher, class_name: teacher.py:Teacher, config: {patience: 2}}\n"
    )
    prompts = make_prompts(["?", "?"], interaction_kwargs=[{"name": "teacher"}, {}])
    output = converse(recorder(["x"]), prompts, {"interaction_config_path": str(path)})
    reasons = _rows(output, "finish_reason")
    assert reasons[0].startswith(
        "tool_error: interaction teacher, start_interaction: got TypeError"
    )
    assert reasons[1] == "stop"


def test_trace(converse, make_prompts, recorder, tool_file, tmp_path) -> None:
    """A record for each conversation: turns with tokens, calls with times, what was not read, reasons, scores."""

    async def grade(row: dict[str, Any]) -> Outcome:
        return Outcome(math.inf, {}, "", "graded")

    engine = recorder({"use it": CALL, "say it": "42"})
    prompts = make_prompts(["use it", "say it"], meta_info={"global_steps": 12, "validate": True})
    prompts.non_tensor_batch["sample_index"] = object_array([3, 4])
    config = {"function_tool_path": tool_file(ADD), "max_user_turns": 1}
    converse(engine, prompts, config, grade=grade, trace_dir=str(tmp_path / "trace"))
    (path,) = (tmp_path / "trace").iterdir()
    assert path.name.startswith("000012.validate.")
    used, said = (
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()
    )
    assert (used["uid"], used["sample"], used["step"], used["score"]) == ("u0", 3, 12, "Infinity")
    assert [turn["role"] for turn in used["turns"]] == ["assistant", "tool", "assistant"]
    (call,) = used["turns"][1]["calls"]
    assert (call["name"], call["answer"], json.loads(call["arguments"])) == (
        "add",
        "42",
        {"a": 40, "b": 2},
    )
    tokens = [token for turn in used["turns"] for token in turn["token_ids"]]
    assert len(tokens) == used["num_response_tokens"] > used["num_model_tokens"]
    assert (
        used["prompt_token_ids"] == engine.seen[0][0] and used["finish_reason"] == "max_user_turns"
    )
    assert said["turns"][0]["text"] == "42<|im_end|>" and said["seconds"] > 0
    assert used["agent"] == "tool_agent"  # the default: the sample names no loop


@register("test_second_thought")
class SecondThought(AgentLoop):
    """Asks once more, briefly."""

    async def run(self, chat: Conversation) -> None:
        """Two turns."""
        await chat.generate(max_tokens=3)
        chat.append([{"role": "user", "content": "Sure?"}])
        await chat.generate()


@register("test_broken")
class Broken(AgentLoop):
    """An environment that fails."""

    async def run(self, chat: Conversation) -> None:
        """One turn, then a mistake."""
        await chat.generate()
        raise KeyError("board")


def test_loops_of_ones_own(converse, make_prompts, recorder, tokenizer) -> None:
    """A sample names its loop; an environment that fails ends its own conversation; unknown names are refused."""
    engine = recorder({"Sure?": "yes", "": "abcdef"})
    prompts = make_prompts(["?"] * 3, agent_name=["test_second_thought", "test_broken", None])
    output = converse(
        engine, prompts, mode="async", agent={"default_agent_loop": "single_turn_agent"}
    )
    first, broken, single = _responses(output, tokenizer)
    assert first.startswith("[abc]<|im_end|>\n<|im_start|>user\nSure?") and first.endswith(
        "[yes<|im_end|>]"
    )
    assert broken == single == "[abcdef<|im_end|>]"
    assert _rows(output, "finish_reason") == ["stop", "loop_error: KeyError: 'board'", "stop"]
    with pytest.raises(RolloutError, match="agent_name: got 'chess', expected one of"):
        converse(engine, make_prompts(["?"], agent_name=["chess"]), mode="async")


@register("test_branches")
class Branches(AgentLoop):
    """A rollout with two further conversations, of which one says nothing."""

    async def run(self, chat: Conversation) -> None:
        """One turn of two agents, at the same time."""
        chat.agent = "solver"
        checker = chat.another("checker")
        checker.begin([{"role": "user", "content": "Check."}])
        await asyncio.gather(chat.generate(), checker.generate())
        chat.another("silent")


def test_a_rollout_of_several_rows(converse, make_prompts, recorder, tokenizer) -> None:
    """Each conversation with a turn is a row with seeds of its own; they share rollout and grade."""

    async def grade(row: dict[str, Any]) -> Outcome:
        return Outcome(float(len(row["solution_str"])), {}, "", "graded")

    engine = recorder({"Check.": "right", "": "four"})
    ids = ["u0/0", "u1/0"]
    names = ["test_branches", "single_turn_agent"]
    prompts = make_prompts(["2 + 2?", "?"], agent_name=names, rollout_id=ids)
    output = converse(engine, prompts, mode="async", grade=grade)
    end = "<|im_end|>]"
    assert _responses(output, tokenizer) == [f"[four{end}", f"[right{end}", f"[four{end}"]
    assert _rows(output, "rollout_id") == ["u0/0", "u0/0", "u1/0"]
    assert _rows(output, "agent") == ["solver", "checker", ""]
    assert [outcome.score for outcome in _rows(output, "reward_outcome")] == [4.0, 4.0, 4.0]
    assert len({params.seed for *_, params in engine.seen}) == 3


def test_a_loop_out_of_a_file(converse, make_prompts, recorder, tool_file, tokenizer) -> None:
    """`agent_loop_path` registers; loading it again replaces it."""
    path = tool_file(
        """
@register("test_polite")
class Polite(AgentLoop):
    async def run(self, chat):
        chat.begin([{"role": "user", "content": "Please."}])
        await chat.generate()
"""
    )
    agent = {"agent_loop_path": path, "default_agent_loop": "test_polite"}
    engine = recorder({"Please.": "gladly"})
    for _ in range(2):
        output = converse(engine, make_prompts(["?"]), mode="async", agent=agent)
        assert _responses(output, tokenizer) == ["[gladly<|im_end|>]"]


def test_loops_that_a_yaml_file_lists(
    converse, make_prompts, recorder, tool_file, tokenizer, tmp_path
) -> None:
    """One class under two names, with an argument each; a class that is no loop is refused."""
    path = tool_file(
        """
class Polite(AgentLoop):
    def __init__(self, services, *, word):
        super().__init__(services)
        self.word = word

    async def run(self, chat):
        chat.begin([{"role": "user", "content": self.word}])
        await chat.generate()
"""
    )
    listed = tmp_path / "loops.yaml"
    entries = [
        {"name": f"test_{word}", "_target_": f"{path}:Polite", "word": word}
        for word in ("Please.", "Pray.")
    ]
    listed.write_text(yaml.safe_dump(entries))
    agent = {"agent_loop_path": str(listed)}
    prompts = make_prompts(["?", "?"], agent_name=["test_Please.", "test_Pray."])
    engine = recorder({"Please.": "gladly", "Pray.": "amen"})
    output = converse(engine, prompts, mode="async", agent=agent)
    assert _responses(output, tokenizer) == ["[gladly<|im_end|>]", "[amen<|im_end|>]"]
    listed.write_text(yaml.safe_dump([{"name": "test_none", "_target_": "pathlib.Path"}]))
    with pytest.raises(ConfigError, match="expected a subclass of AgentLoop"):
        converse(engine, prompts, mode="async", agent=agent)
    listed.write_text(yaml.safe_dump([{"name": "test_none"}]))
    with pytest.raises(ConfigError, match="_target_"):
        converse(engine, prompts, mode="async", agent=agent)
