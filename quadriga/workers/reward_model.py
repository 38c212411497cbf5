# SPDX-License-Identifier: Apache-2.0
"""Reward model worker: a frozen classifier gives one score to each response.

The reward model reads the tokens of the policy, or the chat rendered by its own template:

    rows of the policy ─ policy's tokens ────────────────────────> SequenceTokens ─> sequences_batch
                       └ rendered_chats: template, tokenizer ────┘                   ─> engine

A "judge" below is the tokenizer of the reward model, with whose chat template chats are rendered.

Legend: B rows, P prompt positions, T response positions, L tokens of a row.
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
from quadriga.workers.models import load_reward_scorer

_KEY = "reward_model.model.input_tokenizer"


class RewardModelWorker(EngineWorker):
    """A frozen reward model, which scores the responses of the policy."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and its tokenizer. Returns the choices, with reasons, to be printed."""
        section = self.config.reward_model
        model_section = section.model
        self.join(section, model_section.fsdp_config, "reward_model.model")

        loaded = load_reward_scorer(
            str(model_section.path),
            self.dtype.value,
            self.processes,
            trust_remote_code=model_section.trust_remote_code,
        )
        model = loaded.scorer.model
        self.vocabulary_size = model.get_input_embeddings().num_embeddings
        self.engine, about = self.build_frozen(loaded, model_section.fsdp_config, "reward model")

        self.judge, tokenizer_limit, reason = choose_tokenizer(self.config, self.tokenizer)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        max_length = section.max_length
        if max_length is not None and positions is not None and max_length > positions:
            raise ConfigError(
                "reward_model.max_length",
                got=str(max_length),
                expected=f"at most {positions}, the positions of the reward model",
                fix="Lower it, or leave it out.",
            )
        # Without a configured limit, the smaller one of model and tokenizer applies.
        known_limits = [limit for limit in (positions, tokenizer_limit) if limit]
        self.limit = max_length or min(known_limits, default=None)
        if self.limit is not None:
            reason += f", up to {self.limit} tokens"
        return {"reward model": about, "reward inputs": reason}

    @register(Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def reads_chats(self) -> bool:
        """Whether `compute_rm_score` reads `CHAT_OBJECTS` besides the tokens."""
        return self.judge is not None

    @register(BY_REPLICA, blocking=False)
    @timed("rm")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Score responses.

        Args:
            data: rows with `MODEL_INPUTS`, and `CHAT_OBJECTS` if the reward model reads chats.

        Returns:
            `rm_scores` [B, T]: the score at the last valid token of each response, zero elsewhere.
            The metric `reward/rm_cut` counts sequences that were too long and lost their beginning.

        Raises:
            EngineError, DataError: see `sequences`.
            RewardError: a score is not finite.
        """
        sequences = self.sequences(data)
        # Too long sequences lose their beginning.
        rows = [sequence.cut(self.limit) for sequence in sequences]
        num_cut = sum(row is not sequence for row, sequence in zip(rows, sequences, strict=True))

        section = self.config.reward_model
        num_sequences = None if section.use_dynamic_bsz else section.micro_batch_size_per_gpu
        micro = MicroBatching(
            num_sequences, section.forward_max_token_len_per_gpu, self.share_prompts
        )
        scores = infer(self.engine, sequences_batch(rows), micro)["scores"].sum(-1)
        release_free_memory()

        # A single such score would spoil the advantages of all responses to its prompt.
        broken_rows = (~torch.isfinite(scores)).nonzero()[:, 0].tolist()
        if broken_rows:
            first = broken_rows[0]
            raise RewardError(
                "reward model",
                got=f"{len(broken_rows)} of {len(scores)} scores that are not finite, "
                f"first {scores[first]:g} for row {first}",
                expected="finite scores",
                fix="Set reward_model.model.fsdp_config.model_dtype=float32, or check the model's "
                "weights.",
            )

        # The score belongs to the last valid token, even if the response mask leaves it out.
        num_columns = data.batch["response_mask"].shape[1]
        lengths = data.batch["attention_mask"][:, -num_columns:].sum(-1)
        rm_scores = torch.zeros(len(data), num_columns, dtype=torch.float32)
        rm_scores[torch.arange(len(data)), lengths - 1] = scores
        metrics = {"reward/rm_cut": Metric(num_cut, "sum")}
        return DataProto.from_dict(tensors={"rm_scores": rm_scores}, meta_info={"metrics": metrics})

    def sequences(self, data: DataProto) -> list["SequenceTokens"]:
        """Convert rows to the tokens that the reward model reads.

        These are the policy's tokens, or the tokens of chats rendered by the reward model's
        template.

        Args:
            data: rows with `MODEL_INPUTS`, and `CHAT_OBJECTS` if the reward model reads chats.

        Raises:
            EngineError: a row lacks its prompt or response, has a token that the reward model does
                not know, or has images although its chat must be rendered again.
            DataError: there are no chats, or the template refuses one.
        """
        input_ids = data.batch["input_ids"].cpu().numpy()
        is_valid = data.batch["attention_mask"].cpu().numpy() != 0
        position_ids = data.batch["position_ids"].cpu()
        prompt_width = input_ids.shape[1] - data.batch["response_mask"].shape[1]
        image_inputs = data.non_tensor_batch.get("multi_modal_inputs", [None] * len(data))
        rows = []
        for number, (tokens, valid) in enumerate(zip(input_ids, is_valid, strict=True)):
            # Without padding.
            prompt = tokens[:prompt_width][valid[:prompt_width]].tolist()
            response = tokens[prompt_width:][valid[prompt_width:]].tolist()
            # [B, 3, P + T] for a vision-language policy; a text model counts positions itself.
            positions = None
            if position_ids.dim() == 3:
                positions = position_ids[number][:, torch.from_numpy(valid)]
            if not (prompt and response):
                empty = "response" if prompt else "prompt"
                where = f"row {number} of a batch for the reward model"
                raise EngineError(f"{where}: got an empty {empty}, expected at least one token")
            rows.append(SequenceTokens(prompt, response, positions, image_inputs[number] or {}))
        if self.judge is not None:
            # Images belong to places among the policy's tokens, which rendering would change.
            if any(row.inputs for row in rows):
                raise EngineError(
                    "reward model",
                    got="a prompt with images or videos",
                    expected="text, because it renders chats with its own template",
                    fix=f"Set {_KEY}=null, so that it reads the policy's tokens.",
                )
            return rendered_chats(data, [row.response for row in rows], self.tokenizer, self.judge)

        highest = max((max(*row.prompt, *row.response) for row in rows), default=0)
        if highest >= self.vocabulary_size:
            raise EngineError(
                "reward model",
                got=f"token id {highest} of the policy",
                expected=f"ids below {self.vocabulary_size}, the size of its vocabulary",
                fix=f"Set {_KEY} to the policy's tokenizer: responses are then rendered for the "
                "reward model.",
            )
        return rows


@dataclass(frozen=True)
class SequenceTokens:
    """The tokens of one row for the reward model."""

    prompt: list[int]  # computed once for rows that share it
    response: list[int]
    positions: torch.Tensor | None = None  # [3, L], only for vision-language models
    # Inputs of the vision encoder, if the row has images or videos.
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def cut(self, limit: int | None) -> "SequenceTokens":
        """Cut a row to its last `limit` tokens. At least the first of them counts as prompt.

        Args:
            limit: maximum number of tokens. None: no limit.

        Returns:
            The row itself if it is not longer, else a shorter row.

        Raises:
            EngineError: the row has images or videos, which cannot be cut.
        """
        length = len(self.prompt) + len(self.response)
        if limit is None or length <= limit:
            return self
        if self.inputs:
            raise EngineError(
                "reward model",
                got=f"{length} tokens",
                expected=f"at most {limit}, for a row with images or videos is not cut",
                fix="Raise reward_model.max_length, or lower data.max_prompt_length.",
            )
        tokens = [*self.prompt, *self.response][-limit:]
        # If the response alone is longer than the limit, its first remaining token is the prompt.
        prompt_length = max(1, len(tokens) - len(self.response))
        positions = self.positions
        if positions is not None:
            positions = positions[:, -limit:]
            # Positions of a sequence begin at 0.
            positions = positions - positions.min()
        return SequenceTokens(tokens[:prompt_length], tokens[prompt_length:], positions)


def rendered_chats(
    data: DataProto,
    responses: Sequence[Sequence[int]],
    policy: PreTrainedTokenizerBase,
    judge: PreTrainedTokenizerBase,
) -> list[SequenceTokens]:
    """Render chats with the template of `judge` and encode them.

    A response is a single assistant message. With turns of tools or users, it is the messages of
    the column `solution_messages`.

    Args:
        data: rows with the columns `raw_prompt` and `uid`.
        responses: token ids of the policy for each row, without padding.
        policy: decodes the responses.
        judge: tokenizer of the reward model.

    Returns:
        The tokens of each row. Among the rows of a prompt, the tokens that all begin with count as
        prompt.

    Raises:
        DataError: a column is missing, or the template refuses a chat.
    """
    texts = policy.batch_decode(responses, skip_special_tokens=True) if responses else []
    for key in CHAT_OBJECTS:
        if key not in data.non_tensor_batch:
            raise DataError(
                f"column {key}",
                got="nothing",
                expected="the chat messages of each prompt, for the reward model's own template",
                fix="A custom data set must add them to each row if data.return_raw_chat is true.",
            )
    chats, uids = (data.non_tensor_batch[key] for key in CHAT_OBJECTS)
    # The messages of each response, if agent loops generated it; else None.
    solutions = data.non_tensor_batch.get(SOLUTION_MESSAGES, [None] * len(data))
    rendered = []
    for chat, text, uid, solution in zip(chats, texts, uids, solutions, strict=True):
        # A single message is decoded again from the tokens; several are taken as they are.
        response = [{"role": "assistant", "content": text}]
        if solution is not None and len(solution) > 1:
            response = solution
        messages = _messages_of(chat, response)
        try:
            rendering = judge.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=False
            )
        except Exception as error:
            # A template is a program of the model's author, and may raise any exception.
            reason = f"{type(error).__name__}: {error}"
            raise DataError(
                f"prompt {uid}",
                got=f"a chat that the reward model's template refuses ({reason})",
                expected="messages in the form that the reward model was trained on",
                fix="Correct the row's chat, or use another reward model.",
            ) from error
        rendered.append(str(rendering))
    # The template has already written the special tokens.
    encoded = judge(rendered, add_special_tokens=False)["input_ids"] if rendered else []

    # Tokens that all responses to a prompt share count as prompt, so that they are computed once.
    groups = {}
    for uid, tokens in zip(uids, encoded, strict=True):
        groups.setdefault(uid, []).append(tokens)
    shared_lengths = {uid: _shared_length(sequences) for uid, sequences in groups.items()}
    rows = []
    for uid, tokens in zip(uids, encoded, strict=True):
        length = shared_lengths[uid]
        rows.append(SequenceTokens(tokens[:length], tokens[length:]))
    return rows


def _messages_of(
    prompt: Sequence[Mapping[str, Any]], response: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Join the messages of a prompt and a response to a chat.

    If the prompt ends with a message of the assistant, the response continues that message.
    """
    if not ends_with_assistant(prompt):
        return [*prompt, *response]
    # Join the texts of the last message of the prompt and the first one of the response.
    *earlier, beginning = prompt
    first, *later = response
    joined = {**beginning, **first, "content": beginning["content"] + first["content"]}
    return [*earlier, joined, *later]


def _shared_length(sequences: Sequence[list[int]]) -> int:
    """Number of tokens that all sequences begin with; at least 1, because a prompt needs one."""
    # In lexicographic order, all sequences share what the first and the last one share.
    first = min(sequences)
    last = max(sequences)
    for position, (token, last_token) in enumerate(zip(first, last, strict=False)):
        if token != last_token:
            return max(1, position)
    return max(1, len(first))


def choose_tokenizer(
    config: Config, policy: PreTrainedTokenizerBase
) -> tuple[PreTrainedTokenizerBase | None, int | None, str]:
    """Decide whether the reward model reads chats or the tokens of the policy.

    Args:
        config: the configuration.
        policy: tokenizer of the policy.

    Returns:
        The tokenizer that renders chats (None: the reward model reads the policy's tokens), the
        number of tokens that its tokenizer allows (None: unknown), and the reason, to be printed.

    Raises:
        ConfigError: a tokenizer cannot be loaded, or chats must be rendered, but cannot be.
    """
    model = config.reward_model.model
    if model.input_tokenizer is None:
        return None, None, f"the policy's tokens as they are ({_KEY} is null)"
    judge = _load_tokenizer(str(model.path), "reward_model.model.path", model.trust_remote_code)
    # transformers represents an unknown limit by a huge number.
    limit = int(judge.model_max_length) if judge.model_max_length < 2**31 else None
    template = config.data.apply_chat_template_kwargs.get("chat_template", policy.chat_template)

    # The reward model reads the policy's tokens if it would tokenize and render chats in the same
    # way. `difference` is the reason why it does not, for messages.
    if model.input_tokenizer != "auto":
        source = _load_tokenizer(model.input_tokenizer, _KEY, model.trust_remote_code)
        if source.get_vocab() != policy.get_vocab():
            # This tokenizer decodes the responses, so it must be the policy's.
            raise ConfigError(
                _KEY,
                got=f"'{model.input_tokenizer}', whose vocabulary is not that of the run's "
                "tokenizer",
                expected="the policy's tokenizer: it decodes the responses",
                fix=f"Set {_KEY}=auto, or leave it out.",
            )
        difference = f"{_KEY} is set"
    elif policy.get_vocab() != judge.get_vocab():
        difference = "its vocabulary is not the policy's"
    elif template != judge.chat_template:
        difference = "its chat template is not the policy's"
    else:
        return None, limit, "the policy's tokens as they are: one tokenizer for both"

    if not judge.chat_template:
        raise ConfigError(
            "reward_model.model.path",
            got=f"a tokenizer without a chat template, which is needed because {difference}",
            expected="a template to render chats with for the reward model",
            fix='Set "chat_template" in its tokenizer_config.json, or, if the policy\'s tokens '
            f"mean the same to it, {_KEY}=null.",
        )
    return judge, limit, f"chats rendered by its own template: {difference}"


def _load_tokenizer(path: str, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises ConfigError, which names `key`, if it cannot be loaded."""
    try:
        return read_tokenizer(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            key,
            got=f"'{path}' ({reason})",
            expected="a folder or hub name with a tokenizer that transformers can load",
            fix=f"Put the tokenizer beside the model, or set {_KEY}=null if it is the policy's.",
        ) from error


def sequences_batch(rows: Sequence[SequenceTokens]) -> DataProto:
    """Build a batch that predicts a dummy token after each sequence, to score its last token.

    Args:
        rows: the sequences.

    Returns:
        input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T]. T includes the
        dummy token. For vision-language models position_ids [B, 3, P + T] and multi_modal_inputs.
    """
    prompt_width = max((len(row.prompt) for row in rows), default=1)
    response_width = max((len(row.response) for row in rows), default=0) + 1
    input_ids = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    response_mask = torch.zeros(len(rows), response_width, dtype=torch.int64)
    spans = []
    for number, row in enumerate(rows):
        span = slice(prompt_width - len(row.prompt), prompt_width + len(row.response))
        spans.append(span)
        input_ids[number, span] = torch.tensor([*row.prompt, *row.response])
        # The dummy token, with id 0, follows the sequence.
        attention_mask[number, span.start : span.stop + 1] = 1
        response_mask[number, len(row.response)] = 1
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    objects = {}
    if any(row.positions is not None for row in rows):
        position_ids = position_ids[:, None].repeat(1, 3, 1)
        for number, row in enumerate(rows):
            # Nothing reads the position of the dummy token.
            position_ids[number, :, spans[number]] = row.positions
        objects = {"multi_modal_inputs": object_array(row.inputs for row in rows)}
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "response_mask": response_mask,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=objects)
