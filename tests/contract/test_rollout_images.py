# SPDX-License-Identifier: Apache-2.0
"""What every engine that takes images keeps to, and that the others refuse them. A new one joins `ENGINES`."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import quadriga_verl.shim.loops as verl
from quadriga.config import RolloutConfig
from quadriga.data.videos import TIME_TEXT_TYPES, FrameRules, open_video
from quadriga.data.vision import VisionProcessor, load_processor
from quadriga.engines.batches import MicroBatching
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.step import infer
from quadriga.errors import RolloutError
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.memory import images_key
from quadriga.rollout import (
    Balancer,
    Completion,
    HFEngine,
    Images,
    NativeEngine,
    RolloutEngine,
    SamplingParams,
    ScriptedEngine,
    generate_sequences,
)
from quadriga.rollout.agent_loop import (
    AgentLoop,
    AgentLoopManager,
    Conversation,
    ConversationOver,
    Sample,
    register,
)
from quadriga.rollout.agent_loop.conversation import LengthLimits, TurnEncoder
from quadriga.rollout.agent_loop.parsers import ToolCall
from quadriga.rollout.agent_loop.tool_calls import ToolBox, ToolFailedError
from tests.tiny_vision import positions_of, token_types, vision_model
from tests.vision_folder import (
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    named,
    noise,
    picture,
    tiny_image_processor,
    tiny_model,
    tiny_tokenizer,
    write_vision_folder,
)
from tests.vision_folder import FILM as FILM_BOUNDS

PROCESSOR = VisionProcessor(tiny_image_processor(), IMAGE, VIDEO, "tiny")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
FILM = "<|vision_start|><|video_pad|><|vision_end|>"
WIDTH = 32
ASKED = [
    (f"which {PLACE} ?", [noise(16, 16, 0)]),
    (f"which {PLACE} ?", [noise(16, 16, 1)]),
    ("which color ? and w1", []),
    (f"{PLACE} and {PLACE} color ?", [noise(24, 8, 2), picture("red", 8, 32)]),
]

ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    **{
        f"hf {family}": lambda family=family: HFEngine(tiny_model(family), max_num_seqs=3)
        for family in FAMILIES
    },
    **{
        f"native {family}": lambda family=family: NativeEngine(
            vision_model(family=family), max_num_seqs=3
        )
        for family in FAMILIES
    },
    "balanced": lambda: Balancer([HFEngine(tiny_model()), HFEngine(tiny_model())]),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    """Each engine in turn."""
    return ENGINES[request.param]()


def requests() -> tuple[list[list[int]], list[SamplingParams], list[Images | None]]:
    """Two prompts that differ in their image alone, one of text, and one with two images."""
    prompts, images = [], []
    for text, pictures in ASKED:
        ids = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
        seen = PROCESSOR.prompt(ids, pictures, WIDTH, where="here")
        prompts.append(seen.ids)
        one = Images(
            seen.pictures, seen.inputs, seen.positions, tuple(ids), images_key(seen.inputs)
        )
        images.append(one if pictures else None)
    return prompts, [SamplingParams(max_tokens=6, seed=3, ignore_eos=True) for _ in prompts], images


def batch(num_samples: int = 1) -> DataProto:
    """The same as a batch."""
    rows = []
    for text, pictures in ASKED:
        ids = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
        rows.append(PROCESSOR.prompt(ids, pictures, WIDTH, where="here"))
    size = len(rows)
    tensors = {
        "input_ids": torch.zeros(size, WIDTH, dtype=torch.int64),
        "attention_mask": torch.zeros(size, WIDTH, dtype=torch.int64),
        "position_ids": torch.zeros(size, 3, WIDTH, dtype=torch.int64),
    }
    for row, seen in enumerate(rows):
        start = WIDTH - len(seen.ids)
        tensors["input_ids"][row, start:] = torch.tensor(seen.ids)
        tensors["attention_mask"][row, start:] = 1
        tensors["position_ids"][row, :, start:] = seen.positions
    columns = {
        name: object_array([seen.columns()[name] for seen in rows]) for name in rows[0].columns()
    }
    columns["uid"] = np.array([str(row) for row in range(size)], dtype=object)
    return DataProto.from_dict(tensors, columns).repeat(num_samples, interleave=True)


def models(engine: RolloutEngine):
    """The engine's model, in an attention that can do without the engine."""
    model = (engine.engines[0] if isinstance(engine, Balancer) else engine).model
    return tiny_model(model.config.model_type) if isinstance(engine, NativeEngine) else model


def test_log_probs_are_the_models(engine: RolloutEngine) -> None:
    """Against one pass of the whole sequence, whose positions transformers computes by itself. In float32."""
    prompts, sampling, images = requests()
    model = models(engine)
    for prompt, one, done in zip(
        prompts, images, engine.generate_batch(prompts, sampling, images), strict=True
    ):
        ids = torch.tensor([[*prompt, *done.token_ids]])
        inputs = {} if one is None else {**one.inputs, "mm_token_type_ids": (ids == IMAGE).int()}
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done.log_probs), wanted, atol=2e-5), (
            wanted,
            done.log_probs,
        )


def test_videos_behind_images(engine: RolloutEngine) -> None:
    """The same with a video and an image, with two videos, and with text, in one batch. In float32."""
    model = models(engine)
    family = model.config.model_type
    tokenizer, is_glm = tiny_tokenizer(family), family == "glm4v"
    rules = FrameRules(
        4, 2, 2, 64, 1024, (0.5,) * 3, (0.5,) * 3, writes_times=family in TIME_TEXT_TYPES
    )
    per_second, film = 4 if family == "qwen2_5_vl" else None, FILM_BOUNDS if is_glm else None
    frames = {
        "frames": rules,
        "tokens_per_second": per_second,
        "bounds": (START, END),
        "video_bounds": film,
    }
    processor = replace(PROCESSOR, **frames)
    films = [
        np.random.default_rng(seed).integers(0, 256, (4, 24, 24, 3), dtype=np.uint8)
        for seed in range(3)
    ]
    clips = [
        rules.read(open_video({"frames": one, "fps": 8}, folder=Path(), where=""), where="")
        for one in films
    ]
    asked = [
        # Transformers tells images and videos of GLM-4V in one prompt not apart.
        (f"{'w2' if is_glm else PLACE} w1 {FILM} ?", [] if is_glm else ASKED[0][1], clips[:1]),
        (f"{FILM} and {FILM} ?", [], clips[1:]),
        ("w1 ?", [], []),
    ]
    prompts, images = [], []

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    for text, pictures, own in asked:
        seen = processor.prompt(
            encode([named(text, family)])[0], pictures, 200, where="", clips=own, encode=encode
        )
        prompts.append(seen.ids)
        one = Images(
            seen.pictures,
            seen.inputs,
            seen.positions,
            tuple(seen.short_ids),
            images_key(seen.inputs),
        )
        images.append(one if seen.inputs else None)
    sampling = [SamplingParams(max_tokens=5, seed=3, ignore_eos=True)] * 3
    for prompt, one, done in zip(
        prompts, images, engine.generate_batch(prompts, sampling, images), strict=True
    ):
        ids = torch.tensor([[*prompt, *done.token_ids]])
        kinds = token_types(ids) * (torch.arange(ids.shape[1]) < len(prompt))
        inputs = {} if one is None else one.inputs | {"mm_token_type_ids": kinds}
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done.log_probs), wanted, atol=2e-5), (
            wanted,
            done.log_probs,
        )


def test_images_decide(engine: RolloutEngine) -> None:
    """The first two prompts have equal tokens and equal seeds."""
    prompts, sampling, images = requests()
    assert prompts[0] == prompts[1] and images[0].key != images[1].key
    first, second, *_ = engine.generate_batch(prompts, sampling, images)
    assert np.abs(np.array(first.log_probs[:1]) - np.array(second.log_probs[:1])).max() > 1e-3
    again = engine.generate_batch(prompts[:1], sampling[:1], images[:1])[0]
    assert again.token_ids == first.token_ids, "whatever is generated beside it"
    text = engine.generate_batch(prompts[2:3], sampling[2:3])[0]
    assert text.token_ids == engine.generate_batch(prompts, sampling, images)[2].token_ids


def test_awaiting_is_the_same(engine: RolloutEngine) -> None:
    prompts, sampling, images = requests()

    async def ask() -> list[Completion]:
        rows = zip(prompts, sampling, images, strict=True)
        return list(await asyncio.gather(*(engine.generate(*row) for row in rows)))

    together = engine.generate_batch(prompts, sampling, images)
    assert [one.token_ids for one in asyncio.run(ask())] == [one.token_ids for one in together]


def test_a_batch(engine: RolloutEngine) -> None:
    """Positions of answers go on along each axis, and the samples of a prompt share their images."""
    config = RolloutConfig(name="hf", ignore_eos=True)
    answers = generate_sequences(
        engine, batch(2), config=config, response_length=6, pad_token_id=0, seed=1
    )
    positions = answers.batch["position_ids"]
    assert positions.shape == (8, 3, WIDTH + 6)
    assert torch.equal(
        positions[:, :, WIDTH:], positions[:, :, WIDTH - 1 : WIDTH] + torch.arange(1, 7)
    )
    # Seven tokens of text; the images are 3 places wide and 4 high.
    assert positions[6, :, WIDTH - 1].tolist() == [7 + 3 + 4 - 1] * 3


def test_conversations_of_one_turn_are_the_same() -> None:
    """`mode=async` against `mode=sync`: tokens, positions and numbers."""
    engine, own = HFEngine(tiny_model()), {"response_length": 6, "seed": 1}
    plain = generate_sequences(
        engine, batch(2), config=RolloutConfig(name="hf"), pad_token_id=0, **own
    )
    config = RolloutConfig(name="hf", mode="async")
    manager = AgentLoopManager(config, tiny_tokenizer(), prompt_length=WIDTH, response_length=6)
    asked = manager.generate(engine, batch(2), seed=1)
    manager.close()
    for name in ("input_ids", "attention_mask", "position_ids", "response_mask"):
        assert torch.equal(plain.batch[name], asked.batch[name]), name
    torch.testing.assert_close(plain.batch["rollout_log_probs"], asked.batch["rollout_log_probs"])


def test_a_later_turn_goes_on_behind_the_images() -> None:
    """What follows a prompt has the positions that an answer would have."""
    _, _, images = requests()
    later = images[3].followed_by([8, 9])
    assert later.short_prompt == (*images[3].short_prompt, 8, 9) and later.key == images[3].key
    last = images[3].position_ids[:, -1]
    assert torch.equal(later.position_ids[:, -2:], torch.stack((last + 1, last + 2), 1))
    assert torch.equal(
        later.followed_by([7]).position_ids, images[3].followed_by([8, 9, 7]).position_ids
    )


@register("renders anew")
class _Rendering(AgentLoop):
    async def run(self, chat) -> None:
        chat.begin([{"role": "user", "content": "w1"}])


def test_a_prompt_with_images_is_not_rendered_anew() -> None:
    config = RolloutConfig(name="hf", mode="async", agent={"default_agent_loop": "renders anew"})
    manager = AgentLoopManager(config, tiny_tokenizer(), prompt_length=WIDTH, response_length=6)
    with pytest.raises(RolloutError, match="row 0: got images in a later turn, or beside tools"):
        manager.generate(ScriptedEngine(["w1"], tokenizer=tiny_tokenizer()), batch(), seed=1)
    manager.close()


LOOK = """
from quadriga.rollout.agent_loop import WithImages, function_tool
from tests.vision_folder import noise

@function_tool
def look(number: int) -> WithImages:
    \"\"\"Shows a picture.

    Args:
        number: which one.
    \"\"\"
    return WithImages([noise(24, 8, number)], f"w{number} <|image_pad|>")
"""
SHOWN = noise(8, 16, 5)


@register("looks")
class _Looking(AgentLoop):
    """A picture by a tool, one by the user, and one that no turn follows; row 0 is rendered anew."""

    async def run(self, chat) -> None:
        if chat.sample.row == 0:
            chat.begin(
                [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": " w7 ?"}],
                    }
                ]
            )
        await chat.generate(max_tokens=1)
        async with ToolBox(
            self.services.tools, {}, self.services.config.multi_turn, self.services.thread
        ) as tools:
            [response] = await tools.call_all([ToolCall("look", {"number": chat.sample.row})])
        message = {
            "role": "tool",
            "name": "look",
            "tool_call_id": "call00000",
            "content": response.content,
        }
        chat.append([message], tool_responses=[response])
        await chat.generate(max_tokens=1)
        shown = {"type": "image", "image": SHOWN}
        chat.append([{"role": "user", "content": [{"type": "text", "text": "w9 "}, shown]}])
        await chat.generate(max_tokens=3)
        chat.append([{"role": "user", "content": [shown]}])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["native", "hf"])
def test_images_in_later_turns(name: str, family: str, tmp_path: Path) -> None:
    """Of tools and users, behind prompts with images and of text: log-probs are those of one pass of the whole row by
    the trainer, and tokens and positions those of transformers. A text cannot forge an image."""
    (tmp_path / "look.py").write_text(LOOK)
    turns = {"enable": True, "function_tool_path": str(tmp_path / "look.py")}
    config = RolloutConfig(
        name=name, mode="async", agent={"default_agent_loop": "looks"}, multi_turn=turns
    )
    engine = (
        NativeEngine(vision_model(family=family))
        if name == "native"
        else HFEngine(tiny_model(family))
    )
    processor = load_processor(write_vision_folder(tmp_path / "model", family))
    lengths = {"prompt_length": WIDTH, "response_length": 60}
    manager = AgentLoopManager(config, tiny_tokenizer(family), **lengths, processor=processor)
    prompts = batch()
    prompts.non_tensor_batch["raw_prompt"] = object_array([[{"role": "user", "content": ""}]] * 4)
    prompts.meta_info["do_sample"] = True
    # With these seeds no random model writes the token of an image itself.
    done = manager.generate(engine, prompts, seed={"qwen2_vl": 4, "glm4v": 9}.get(family, 5))
    manager.close()
    inputs, model = done.non_tensor_batch["multi_modal_inputs"], tiny_model(family)
    assert [len(one["image_grid_thw"]) for one in inputs] == [3, 3, 2, 4], done.non_tensor_batch[
        "finish_reason"
    ]
    for row, one in enumerate(inputs):
        valid = done.batch["attention_mask"][row].bool()
        ids, positions = (
            done.batch["input_ids"][row][valid],
            done.batch["position_ids"][row][:, valid],
        )
        assert torch.equal(positions, positions_of(model, ids.tolist(), one)), row
    scorer = PolicyScorer(vision_model(family=family))
    trainer = FSDPEngine(scorer, dtype=torch.float32, device=torch.device("cpu"))
    for share in (True, False):
        found = infer(trainer, done, MicroBatching(9, 1, share_prompts=share))["log_probs"]
        wanted = done.batch["rollout_log_probs"]
        torch.testing.assert_close(
            found * done.batch["response_mask"], wanted, atol=2e-5, rtol=1e-5
        )
    assert done.batch["response_mask"].sum(-1).tolist() == [5] * 4


def test_a_later_image_that_cannot_be_shown(tmp_path: Path) -> None:
    """By a model of text, a file that is no image, and behind a token that the model wrote itself."""
    sample = Sample(0, "u", [8, 9], None, {}, "", num_axes=3)
    processor = load_processor(write_vision_folder(tmp_path / "model"))
    limits, encoder = LengthLimits(20, 40, 60), TurnEncoder(tiny_tokenizer(), {})
    params = SamplingParams(max_tokens=9)

    def begun(written: str, processor: VisionProcessor | None) -> Conversation:
        engine = ScriptedEngine([written], tokenizer=tiny_tokenizer())
        chat = Conversation(engine, encoder, sample, params, limits, processor=processor)
        asyncio.run(chat.generate())
        return chat

    def shown(image: object) -> list[dict[str, object]]:
        return [{"role": "user", "content": [{"type": "image", "image": image}]}]

    with pytest.raises(
        RolloutError,
        match="got images in a later turn, or beside tools, expected text, or a vision-l",
    ):
        begun("w1", None).append(shown(SHOWN))
    with pytest.raises(
        ToolFailedError, match="row 0, image 0: got 5 bytes, which is no image that can be read"
    ):
        begun("w1", processor).append(shown(b"words"))
    chat = begun("w1 <|image_pad|>", processor)
    with pytest.raises(
        ConversationOver, match="image_token: the model wrote the token of images itself"
    ):
        chat.append(shown(SHOWN))
    chat = begun("w1", processor)
    chat.append(shown(SHOWN))
    assert (
        len(chat.images.pictures) == 1
        and chat.images.position_ids.shape[1] == len(chat.token_ids) + 2
    )
    chat.finish("")
    assert chat.images is None and len(chat.token_ids) == 2


MESSAGES = [[{"type": "image"}, {"type": "text", "text": " look ?"}]] * 2
MESSAGES += ["look w1", [{"type": "image"}, {"type": "image"}, {"type": "text", "text": " look"}]]
NINE = {"type": "text", "text": "w9 "}


@register("ours")
class _Ours(AgentLoop):
    async def run(self, chat) -> None:
        chat.begin(chat.sample.messages)
        await chat.generate(max_tokens=2)
        chat.append([{"role": "user", "content": [NINE, {"type": "image", "image": SHOWN}]}])
        await chat.generate(max_tokens=2)


@register("ours with tools")
class _OursWithTools(AgentLoop):
    async def run(self, chat) -> None:
        chat.begin(chat.sample.messages)
        await chat.generate(max_tokens=2)
        async with ToolBox(
            self.services.tools, {}, self.services.config.multi_turn, self.services.thread
        ) as tools:
            [response] = await tools.call_all([ToolCall("look", {"number": 3})])
        chat.append(
            [
                {
                    "role": "tool",
                    "name": "look",
                    "tool_call_id": "call00000",
                    "content": response.content,
                }
            ]
        )
        await chat.generate(max_tokens=2)


@verl.register("theirs")
class _Theirs(verl.AgentLoopBase):
    """verl's form of `_Ours`; row 1 forgets that its prompt has an image."""

    async def run(self, sampling_params, **kwargs) -> verl.AgentLoopOutput:
        seen, own = (
            await self.process_vision_info(kwargs["raw_prompt"]),
            {**sampling_params, "max_tokens": 2},
        )
        ids = await self.apply_chat_template(kwargs["raw_prompt"], **seen)
        if kwargs["extra_info"]["forgets"]:
            ids = self.tokenizer("<user> <|image_pad|>")["input_ids"]
        asked = {"sampling_params": own, "image_data": seen.get("images")}
        first = await self.server_manager.complete("a", prompt_ids=ids, **asked)
        messages = [{"role": "user", "content": [NINE, {"type": "image"}]}]
        turn = await self.apply_chat_template(messages, images=[SHOWN], remove_system_prompt=True)
        second = await self.server_manager.complete(
            "a", prompt_ids=[*ids, *first.token_ids, *turn], **asked
        )
        response, mask = (
            [*first.token_ids, *turn, *second.token_ids],
            [1, 1, *[0] * len(turn), 1, 1],
        )
        return verl.AgentLoopOutput(prompt_ids=ids, response_ids=response, response_mask=mask)


@verl.register("theirs with tools")
class _TheirsWithTools(verl.ToolAgentLoop):
    """verl's tool loop; each turn of the model is read as a call."""

    async def run(self, sampling_params, **kwargs) -> verl.AgentLoopOutput:
        self.tool_parser = self
        return await super().run({**sampling_params, "max_tokens": 2}, **kwargs)

    async def extract_tool_calls(self, response_ids):
        return "", [verl.FunctionCall(name="look", arguments='{"number": 3}')]


def test_loops_of_verl_show_images(tmp_path: Path) -> None:
    """Those of prompts, tools and users, with tokens, positions, numbers and inputs as our loops have them."""
    (tmp_path / "look.py").write_text(LOOK)
    turns = {
        "enable": True,
        "function_tool_path": str(tmp_path / "look.py"),
        "max_assistant_turns": 2,
    }
    prompts, engine = batch(), HFEngine(tiny_model())
    messages = [[{"role": "user", "content": content}] for content in MESSAGES]
    prompts.non_tensor_batch["raw_prompt"] = object_array(messages)
    processor = load_processor(write_vision_folder(tmp_path / "model"))

    def done(loop: str, forgets: bool = False) -> DataProto:
        prompts.non_tensor_batch["extra_info"] = object_array(
            [{"forgets": forgets and row == 1} for row in range(4)]
        )
        config = RolloutConfig(
            name="hf",
            mode="async",
            ignore_eos=True,
            agent={"default_agent_loop": loop},
            multi_turn=turns,
        )
        lengths = {"prompt_length": WIDTH, "response_length": 40}
        manager = AgentLoopManager(config, tiny_tokenizer(), **lengths, processor=processor)
        try:
            return manager.generate(engine, prompts, seed=7)
        finally:
            manager.close()

    for ours, theirs in (("ours", "theirs"), ("ours with tools", "theirs with tools")):
        wanted, found = done(ours), done(theirs)
        assert (wanted.batch["input_ids"][:, -40:] == IMAGE).sum(-1).min() > 0
        for name in (
            "input_ids",
            "attention_mask",
            "position_ids",
            "response_mask",
            "rollout_log_probs",
        ):
            torch.testing.assert_close(found.batch[name], wanted.batch[name], msg=name)
        columns = (one.non_tensor_batch["multi_modal_inputs"] for one in (wanted, found))
        for one, other in zip(*columns, strict=True):
            assert one.keys() == other.keys() and all(
                torch.equal(one[name], other[name]) for name in one
            )
    with pytest.raises(
        RolloutError,
        match=r"got images, but not the tokens that were rendered for them, expected the tokens of self",
    ):
        done("theirs", forgets=True)


class TextEngine(RolloutEngine):
    """A user's engine for text, with weights of its own."""

    name = "mine"

    def load_weights(self, weights, version) -> None:
        raise NotImplementedError

    named_weights = fingerprint = load_weights

    def generate_batch(self, prompts, sampling, images=None) -> list[Completion]:
        self._require_ready(prompts, sampling, images)
        return [Completion([1], [0.0], "stop", 0) for _ in prompts]


def test_engines_for_text_refuse_images_by_name() -> None:
    engine, (prompts, sampling, images) = TextEngine(), requests()
    told = "mine.generate: got a prompt with images, expected text: the engine mine takes no images"
    config = RolloutConfig(name="hf")
    with pytest.raises(RolloutError, match=told):
        generate_sequences(
            engine, batch(), config=config, response_length=6, pad_token_id=0, seed=1
        )
    with pytest.raises(RolloutError, match=told):
        asyncio.run(engine.generate(prompts[0], sampling[0], images[0]))
    with pytest.raises(RolloutError, match=told):
        Balancer([engine]).generate_batch(prompts, sampling, images)
    text = generate_sequences(
        engine, batch()[[2]], config=config, response_length=6, pad_token_id=0, seed=1
    )
    assert text.batch["response_mask"].sum() == 1
    assert asyncio.run(engine.generate(prompts[2], sampling[2])).token_ids == [1]


def test_a_model_that_reads_text_refuses_images() -> None:
    engine, (prompts, sampling, images) = HFEngine(tiny_model()), requests()
    engine.model.config.vision_config = None
    with pytest.raises(
        RolloutError,
        match=r"hf\.generate: got a prompt with images, for a model of type qwen2_5_vl",
    ):
        engine.generate_batch(prompts, sampling, images)


def test_a_script_does_not_look() -> None:
    prompts, sampling, images = requests()
    engine = ScriptedEngine(lambda prompt: [len(prompt)])
    found = engine.generate_batch(prompts, sampling, images)
    assert [one.token_ids for one in found] == [[len(prompt)] for prompt in prompts]


def test_keys() -> None:
    inputs = PROCESSOR.inputs([noise(16, 16)], where="")
    key = images_key(inputs)
    assert (
        key
        == images_key(dict(reversed(inputs.items())))
        == images_key(PROCESSOR.inputs([noise(16, 16)], where=""))
    )
    changed = inputs["pixel_values"].clone()
    changed[3, 5] += 1e-3
    assert key != images_key({**inputs, "pixel_values": changed})
    assert key != images_key({**inputs, "image_grid_thw": inputs["image_grid_thw"] * 2})
    one = Images((), inputs, torch.zeros(3, 1), (1,), key)
    assert replace(one, short_prompt=(2,)).key == key and hash(one) is not None
