# SPDX-License-Identifier: Apache-2.0
"""The reward model: one score for each response, by a classifier that was trained to score responses.

It reads the policy's own tokens, or the chat rendered by its own template and tokenizer:

    rows of the policy ─ its tokens ──────────────────────────────────────> SequenceTokens ─ sequences_batch ─> engine
                       └ rendered_chats: text, own template, own tokens ──┘

Legend: B rows, P prompt positions, T response positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.data.tokenizing import read_tokenizer
from quadriga.engines.batches import MicroBatching
from quadriga.engines.step import infer
from quadriga.errors import ConfigError, DataError, EngineError, RewardError
from quadriga.observe.machine import release_free_memory
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.chats import ends_with_assistant
from quadriga.protocol.columns import object_array
from quadriga.single_controller import Dispatch, Execute, register
from quadriga.workers.base import BY_REPLICA, CHAT_OBJECTS, SOLUTION_MESSAGES, EngineWorker, timed
from quadriga.workers.models import load_judge

_KEY = "reward_model.model.input_tokenizer"


class RewardModelWorker(EngineWorker):
    """A frozen reward model, and the tokenizer of the policy whose responses it scores."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and its tokenizer. Returns what was chosen, with reasons, for people to read."""
        section, model_section = self.config.reward_model, self.config.reward_model.model
        self.join(section, model_section.fsdp_config, "reward_model.model")
        path, trust = str(model_section.path), model_section.trust_remote_code
        loaded = load_judge(path, self.dtype.value, self.processes, trust_remote_code=trust)
        model = loaded.scorer.model
        self.vocabulary_size = model.get_input_embeddings().num_embeddings
        self.engine, about = self.build_frozen(loaded, model_section.fsdp_config, "reward model")
        self.judge, tokenizer_limit, reason = choose_tokenizer(self.config, self.tokenizer)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        given = self.config.reward_model.max_length
        if given is not None and positions is not None and given > positions:
            got, expected = str(given), f"at most {positions}, the positions of the reward model"
            raise ConfigError(
                "reward_model.max_length",
                got=got,
                expected=expected,
                fix="Lower it, or leave it out.",
            )
        self.limit = given or min(
            (limit for limit in (positions, tokenizer_limit) if limit), default=None
        )
        longest = "" if self.limit is None else f", up to {self.limit} tokens"
        return {"reward model": about, "reward inputs": f"{reason}{longest}"}

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def reads_chats(self) -> bool:
        """Whether `compute_rm_score` reads `raw_prompt` and `uid` beside the tokens."""
        return self.judge is not None

    @register(dispatch_mode=BY_REPLICA, blocking=False)
    @timed("rm")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` [B, T]: the score at the last valid token of each response, zero elsewhere; and the metric
        `reward/rm_cut`, the sequences whose beginning was cut off because they were too long.
        Raises EngineError, DataError: as `sequences`. RewardError: a score that is not finite."""
        whole = self.sequences(data)
        rows = whole if self.limit is None else [row.cut(self.limit) for row in whole]
        num_cut = sum(row is not before for row, before in zip(rows, whole, strict=True))
        section = self.config.reward_model
        num_sequences = None if section.use_dynamic_bsz else section.micro_batch_size_per_gpu
        micro = MicroBatching(
            num_sequences, section.forward_max_token_len_per_gpu, self.share_prompts
        )
        scores = infer(self.engine, sequences_batch(rows), micro)["scores"].sum(-1)
        release_free_memory()
        broken = (~torch.isfinite(scores)).nonzero()[:, 0].tolist()
        if broken:
            row = broken[0]
            got = f"{len(broken)} of {len(scores)} scores that are not finite, first {scores[row]:g} for row {row}"
            fix = "Set reward_model.model.fsdp_config.model_dtype=float32, or check the model's weights."
            raise RewardError("reward model", got=got, expected="finite scores", fix=fix)
        num_columns = data.batch["response_mask"].shape[1]
        lengths = data.batch["attention_mask"][:, -num_columns:].sum(-1)
        rm_scores = torch.zeros(len(data), num_columns, dtype=torch.float32)
        rm_scores[torch.arange(len(data)), lengths - 1] = scores
        metrics = {"reward/rm_cut": Metric(num_cut, "sum")}
        return DataProto.from_dict(tensors={"rm_scores": rm_scores}, meta_info={"metrics": metrics})

    def sequences(self, data: DataProto) -> list["SequenceTokens"]:
        """The rows as the reward model reads them: the policy's tokens, or chats rendered by its own template.
        Raises EngineError: a row lacks prompt or response, or has a token that the reward model does not know; or it
        has images, and is rendered anew. DataError: there are no chats, or the template refuses one."""
        input_ids, attention = (
            data.batch[key].cpu().numpy() for key in ("input_ids", "attention_mask")
        )
        width = input_ids.shape[1] - data.batch["response_mask"].shape[1]
        rows, axes = (
            [],
            data.batch["position_ids"].cpu() if data.batch["position_ids"].dim() == 3 else None,
        )
        given = data.non_tensor_batch.get("multi_modal_inputs", [None] * len(data))
        for number, (tokens, valid) in enumerate(zip(input_ids, attention != 0, strict=True)):
            positions = None if axes is None else axes[number][:, torch.from_numpy(valid)]
            response = tokens[width:][valid[width:]].tolist()
            row = SequenceTokens(
                tokens[:width][valid[:width]].tolist(), response, positions, given[number] or {}
            )
            if not (row.prompt and row.response):
                empty = "response" if row.prompt else "prompt"
                where = f"row {number} of a batch for the reward model"
                raise EngineError(f"{where}: got an empty {empty}, expected at least one token")
            rows.append(row)
        if self.judge is not None and any(row.inputs for row in rows):
            expected, fix = (
                "text: it reads chats by its own template",
                f"Set {_KEY}=null, for the policy's tokens.",
            )
            raise EngineError(
                "reward model", got="a prompt with images or videos", expected=expected, fix=fix
            )
        if self.judge is not None:
            return rendered_chats(data, [row.response for row in rows], self.tokenizer, self.judge)
        highest = max((max(*row.prompt, *row.response) for row in rows), default=0)
        if highest >= self.vocabulary_size:
            expected = f"ids below {self.vocabulary_size}, the size of its vocabulary"
            fix = f"Set {_KEY} to the policy's tokenizer: responses are then rendered for the reward model."
            raise EngineError(
                "reward model", got=f"token id {highest} of the policy", expected=expected, fix=fix
            )
        return rows


@dataclass(frozen=True)
class SequenceTokens:
    """The tokens of one row for the reward model: the beginning that it may share with others, and the rest; of a
    vision-language model their positions [3, L], and what it takes of images and videos."""

    prompt: list[int]
    response: list[int]
    positions: torch.Tensor | None = None
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def cut(self, limit: int) -> "SequenceTokens":
        """The last `limit` tokens, at least one of them as prompt. EngineError: images or videos, which are not cut."""
        if (length := len(self.prompt) + len(self.response)) <= limit:
            return self
        if self.inputs:
            expected = f"at most {limit}, for a row with images or videos is not cut"
            fix = "Raise reward_model.max_length, or lower data.max_prompt_length."
            raise EngineError("reward model", got=f"{length} tokens", expected=expected, fix=fix)
        tokens = [*self.prompt, *self.response][-limit:]
        kept = max(1, len(tokens) - len(self.response))
        positions = (
            None
            if self.positions is None
            else self.positions[:, -limit:] - self.positions[:, -limit:].min()
        )
        return SequenceTokens(tokens[:kept], tokens[kept:], positions)


def rendered_chats(
    data: DataProto,
    responses: Sequence[Sequence[int]],
    policy: PreTrainedTokenizerBase,
    judge: PreTrainedTokenizerBase,
) -> list[SequenceTokens]:
    """Render chats with the template of `judge` and encode them.

    A response with turns of tools or users follows its prompt as the messages of the column `solution_messages`;
    any other one is a single assistant message.

    Args:
        data: rows with the columns `raw_prompt` and `uid`.
        responses: token ids of the policy for each row, without padding.
        policy: decodes the responses.
        judge: tokenizer of the reward model.

    Returns:
        The tokens of each row. Tokens that all responses to a prompt begin with count as prompt.

    Raises:
        DataError: a column is missing, or the template refuses a chat.
    """
    texts = policy.batch_decode(responses, skip_special_tokens=True) if responses else []
    for key in CHAT_OBJECTS:
        if key not in data.non_tensor_batch:
            expected = "the chat messages of each prompt, for the reward model's own template"
            fix = "A data set of your own must put them into each row where data.return_raw_chat is true."
            raise DataError(f"column {key}", got="nothing", expected=expected, fix=fix)
    chats, uids = (data.non_tensor_batch[key] for key in CHAT_OBJECTS)
    solutions = data.non_tensor_batch.get(SOLUTION_MESSAGES, [None] * len(data))
    rendered = []
    for chat, text, uid, solution in zip(chats, texts, uids, solutions, strict=True):
        messages = [*chat, {"role": "assistant", "content": text}]
        if solution is not None and len(solution) > 1:
            messages = [*chat, *solution]
        if ends_with_assistant(chat):
            continued = messages[len(chat)]
            joined = {
                **chat[-1],
                **continued,
                "content": chat[-1]["content"] + continued["content"],
            }
            messages = [*chat[:-1], joined, *messages[len(chat) + 1 :]]
        try:
            rendered.append(
                str(
                    judge.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
                )
            )
        except Exception as error:
            # A template is a program of the model's author: it may raise what it likes about messages that it dislikes.
            got = (
                f"a chat that the reward model's template refuses ({type(error).__name__}: {error})"
            )
            expected = "messages in the form that the reward model was trained on"
            fix = "Correct the row's chat, or use another reward model."
            raise DataError(f"prompt {uid}", got=got, expected=expected, fix=fix) from error
    # The template has written the special tokens.
    encoded = judge(rendered, add_special_tokens=False)["input_ids"] if rendered else []
    groups: dict[Any, list[list[int]]] = {}
    for uid, tokens in zip(uids, encoded, strict=True):
        groups.setdefault(uid, []).append(tokens)
    shared: dict[Any, int] = {}
    for uid, members in groups.items():
        first, last = (
            min(members),
            max(members),
        )  # in lexicographic order: what these two share, all share
        differing = (
            place
            for place, (one, other) in enumerate(zip(first, last, strict=False))
            if one != other
        )
        shared[uid] = max(1, next(differing, len(first)))
    return [
        SequenceTokens(tokens[: shared[uid]], tokens[shared[uid] :])
        for uid, tokens in zip(uids, encoded, strict=True)
    ]


def choose_tokenizer(
    config: Config, policy: PreTrainedTokenizerBase
) -> tuple[PreTrainedTokenizerBase | None, int | None, str]:
    """The tokenizer by which the reward model reads chats (None: it reads the policy's tokens as they are), how many
    tokens it allows, and the reason, to be printed.
    Raises ConfigError: the tokens must be rendered again and cannot be."""
    model = config.reward_model.model
    if model.input_tokenizer is None:
        return None, None, f"the policy's tokens as they are ({_KEY} is null)"
    judge = _load(str(model.path), "reward_model.model.path", model.trust_remote_code)
    # The longest input in tokens; where none is known, transformers says a number beyond all models.
    limit = int(judge.model_max_length) if judge.model_max_length < 2**31 else None
    template = config.data.apply_chat_template_kwargs.get("chat_template", policy.chat_template)
    if model.input_tokenizer != "auto":
        source = _load(model.input_tokenizer, _KEY, model.trust_remote_code)
        if source.get_vocab() != policy.get_vocab():
            got = f"'{model.input_tokenizer}', whose vocabulary is not that of the run's tokenizer"
            expected = "the policy's tokenizer: it decodes the responses"
            raise ConfigError(
                _KEY, got=got, expected=expected, fix=f"Set {_KEY}=auto, or leave it out."
            )
        difference = f"{_KEY} is set"
    elif policy.get_vocab() != judge.get_vocab():
        difference = "its vocabulary is not the policy's"
    elif template != judge.chat_template:
        difference = "its chat template is not the policy's"
    else:
        return None, limit, "the policy's tokens as they are: one tokenizer for both"
    if not judge.chat_template:
        got = f"a tokenizer without a chat template, where {difference}"
        expected = "a template to render chats with for the reward model"
        fix = 'Set "chat_template" in its tokenizer_config.json, or, if the policy\'s tokens mean the same to it, '
        fix += f"{_KEY}=null."
        raise ConfigError("reward_model.model.path", got=got, expected=expected, fix=fix)
    return judge, limit, f"chats rendered by its own template: {difference}"


def _load(path: str, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return read_tokenizer(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        expected = "a folder or hub name with a tokenizer that transformers can load"
        fix = f"Put the tokenizer beside the model, or set {_KEY}=null if it is the policy's own."
        raise ConfigError(
            key, f"'{path}' ({str(error).strip().partition(chr(10))[0]})", expected, fix
        ) from error


def sequences_batch(rows: Sequence[SequenceTokens]) -> DataProto:
    """Sequences as a batch whose one predicted token stands behind each sequence: what predicts it is its last token.
    Returns input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T], with the token behind counted
    in T; of a vision-language model position_ids [B, 3, P + T] and multi_modal_inputs."""
    before = max((len(row.prompt) for row in rows), default=1)
    after = max((len(row.response) for row in rows), default=0) + 1
    input_ids = torch.zeros(len(rows), before + after, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for number, row in enumerate(rows):
        start, stop = before - len(row.prompt), before + len(row.response)
        input_ids[number, start:stop] = torch.tensor([*row.prompt, *row.response])
        attention_mask[number, start : stop + 1] = 1
    last = torch.tensor([len(row.response) for row in rows], dtype=torch.int64)
    response_mask = (torch.arange(after) == last[:, None]).long()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    seen: dict[str, Any] = {}
    if any(row.positions is not None for row in rows):
        position_ids = position_ids[:, None].repeat(1, 3, 1)
        for number, row in enumerate(rows):
            start, stop = before - len(row.prompt), before + len(row.response)
            position_ids[number, :, start:stop] = (
                row.positions
            )  # nothing reads that of the token behind
        seen = {"multi_modal_inputs": object_array(row.inputs for row in rows)}
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
    }
    return DataProto.from_dict(
        tensors={**tensors, "response_mask": response_mask}, non_tensors=seen
    )
