# SPDX-License-Identifier: Apache-2.0
"""Every column of the training loop: name, shape, dtype, unit, who writes it, who reads it.

This is the one table; `render_fields()` makes the page of the documentation out of it, and a test
compares it with the columns that the code touches.

Legend: B rows (samples), P prompt positions, T response positions, L = P + T. Prompts are padded on
the left, responses on the right.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A column.

    Attributes:
        name: its key in `batch` or `non_tensor_batch`.
        shape: its shape, in the letters of the legend.
        dtype: its torch dtype, or what an object array holds.
        unit: what a value means.
        written_by: packages of quadriga that write it.
        read_by: packages of quadriga that read it.
    """

    name: str
    shape: str
    dtype: str
    unit: str
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether the column lives in `batch`."""
        return not self.dtype.startswith("object")


_DATA, _ROLLOUT, _ENGINES, _WORKERS = ("data",), ("rollout",), ("engines",), ("workers",)
_TRAINER, _REWARDS, _ALGORITHMS = ("trainer",), ("rewards",), ("algorithms",)

_TENSORS = (
    Field(
        "input_ids",
        "(B, P), from the rollout on (B, L)",
        "int64",
        "token id; pad id on padding; as many image tokens as the model has embeddings of the image",
        _DATA + _ROLLOUT,
        _ROLLOUT + _ENGINES,
    ),
    Field(
        "attention_mask",
        "(B, P), from the rollout on (B, L)",
        "int64",
        "1 on tokens, 0 on padding",
        _DATA + _ROLLOUT,
        _ROLLOUT + _REWARDS + _ENGINES + _TRAINER,
    ),
    Field(
        "position_ids",
        "(B, P), from the rollout on (B, L); of models that see (B, 3, P), (B, 3, L): time, height, width",
        "int64",
        "position of the token; 0 on left padding, goes on counting over the response, on all axes alike",
        _DATA + _ROLLOUT,
        _ROLLOUT + _ENGINES,
    ),
    Field("prompts", "(B, P)", "int64", "token id, padded on the left", _ROLLOUT, _REWARDS + _ENGINES + _TRAINER),
    Field("responses", "(B, T)", "int64", "token id, padded on the right", _ROLLOUT, _REWARDS + _ENGINES + _TRAINER),
    Field(
        "response_mask",
        "(B, T)",
        "int64",
        "1 on tokens that the model generated, 0 on padding, tool and user tokens",
        _ROLLOUT,
        _REWARDS + _ENGINES + _TRAINER + _ALGORITHMS,
    ),
    Field(
        "rollout_log_probs",
        "(B, T)",
        "float32",
        "nats: log-probability under the policy that sampled, at its temperature",
        _ROLLOUT,
        _TRAINER + _ENGINES + _ALGORITHMS,
    ),
    Field(
        "old_log_probs",
        "(B, T)",
        "float32",
        "nats: log-probability by the training engine before the update",
        _WORKERS,
        _TRAINER + _ENGINES + _ALGORITHMS,
    ),
    Field(
        "ref_log_prob",
        "(B, T)",
        "float32",
        "nats: log-probability under the reference policy",
        _WORKERS,
        _TRAINER + _ENGINES + _ALGORITHMS,
    ),
    Field("entropys", "(B, T)", "float32", "nats: entropy of the next-token distribution", _WORKERS, _TRAINER),
    Field(
        "sum_pi_squared",
        "(B, T)",
        "float32",
        "probability of drawing the same next token twice, before the update: its square, summed over the vocabulary",
        _WORKERS,
        _ALGORITHMS,
    ),
    Field(
        "values",
        "(B, T)",
        "float32",
        "reward: the critic's estimate of the return",
        _WORKERS,
        _TRAINER + _ENGINES + _ALGORITHMS,
    ),
    Field(
        "token_level_scores",
        "(B, T)",
        "float32",
        "reward as graded, at the last token of the response",
        _TRAINER,
        _TRAINER + _ALGORITHMS,
    ),
    Field(
        "token_level_rewards",
        "(B, T)",
        "float32",
        "reward after the KL penalty; without one, the scores",
        _TRAINER,
        _ALGORITHMS,
    ),
    Field(
        "reward_baselines", "(B,)", "float32", "reward of the greedy answer to the same prompt", _TRAINER, _ALGORITHMS
    ),
    Field(
        "rm_scores",
        "(B, T)",
        "float32",
        "reward by the reward model, at the last token of the response",
        _WORKERS,
        _TRAINER,
    ),
    Field(
        "rollout_is_weights",
        "(B, T)",
        "float32",
        "importance weight of trainer over rollout",
        _TRAINER,
        _ENGINES,
    ),
    Field(
        "covariance_clipped",
        "(B, T)",
        "float32",
        "1 on tokens that the loss clip_cov leaves out",
        _ENGINES,
        _ALGORITHMS,
    ),
    Field(
        "covariance_top",
        "(B, T)",
        "float32",
        "1 on tokens that the loss kl_cov holds near the old policy",
        _ENGINES,
        _ALGORITHMS,
    ),
    Field(
        "advantages", "(B, T)", "float32", "reward above expectation, as the estimator scales it", _TRAINER, _ENGINES
    ),
    Field("returns", "(B, T)", "float32", "reward to come from this token on", _TRAINER, _ENGINES),
    Field("loss_mask", "(B, L)", "int64", "1 on tokens that are learned, in training on examples", _DATA, _TRAINER),
    Field("score_slope", "(B,)", "float32", "derivative of the loss by the row's score", _TRAINER, _ENGINES),
    Field(
        "row_index",
        "(B,)",
        "int64",
        "number of the row in the whole batch before its rows were dealt to ranks",
        _TRAINER,
        _ENGINES + _TRAINER,
    ),
)

_OBJECTS = (
    Field(
        "uid",
        "(B,)",
        "object: str",
        "one per prompt, shared by its samples",
        _TRAINER,
        _ROLLOUT + _WORKERS + _TRAINER + _ALGORITHMS,
    ),
    Field("sample_index", "(B,)", "object: int", "number of the sample among those of its prompt", _TRAINER, _ROLLOUT),
    Field(
        "raw_prompt_ids",
        "(B,)",
        "object: list[int]",
        "token ids of the prompt, without padding, and one token for each image",
        _DATA,
        _ROLLOUT,
    ),
    Field("raw_prompt", "(B,)", "object: list[dict]", "messages of the prompt", _DATA, _ROLLOUT + _WORKERS),
    Field(
        "data_source",
        "(B,)",
        "object: str",
        "name of the data set; chooses the grader",
        _DATA,
        _ROLLOUT + _REWARDS + _TRAINER,
    ),
    Field(
        "reward_model",
        "(B,)",
        "object: dict",
        "how the answer is graded: style, ground_truth",
        _DATA,
        _ROLLOUT + _REWARDS + _TRAINER,
    ),
    Field("extra_info", "(B,)", "object: dict", "what the row brings along: split, ...", _DATA, _ROLLOUT + _REWARDS),
    Field("index", "(B,)", "object: int", "number of the row in its data set", _DATA, _TRAINER),
    Field("agent_name", "(B,)", "object: str", "name of the loop that leads the row's conversation", _DATA, _ROLLOUT),
    Field("tools_kwargs", "(B,)", "object: dict", "arguments of the row's tools", _DATA, _ROLLOUT),
    Field("interaction_kwargs", "(B,)", "object: dict", "arguments of the row's simulated user", _DATA, _ROLLOUT),
    Field(
        "multi_modal_data",
        "(B,)",
        "object: dict[str, list[PIL.Image]]",
        "under `images` those of the prompt, in its order; empty without any; shared by the samples of a prompt",
        _DATA,
        _ROLLOUT,
    ),
    Field(
        "multi_modal_inputs",
        "(B,)",
        "object: dict[str, tensor]",
        "the images as the model takes them: `pixel_values` (patches, values) float32, `image_grid_thw` (images, 3) "
        "int64; empty without any; shared by the samples of a prompt",
        _DATA,
        _ROLLOUT + _ENGINES,
    ),
    Field("full_prompts", "(B,)", "object: str", "the prompt as text, after the chat template", _DATA, _TRAINER),
    Field(
        "num_turns", "(B,)", "object: int", "turns of the conversation after the prompt", _ROLLOUT, _REWARDS + _TRAINER
    ),
    Field(
        "finish_reason",
        "(B,)",
        "object: str",
        "why the conversation ended: stop, length, ...",
        _ROLLOUT,
        _REWARDS + _TRAINER,
    ),
    Field("tool_rewards", "(B,)", "object: dict", "by the name of a tool, what its use earned", _ROLLOUT, _REWARDS),
    Field("turn_scores", "(B,)", "object: list[float]", "what a partner gave, in order", _ROLLOUT, _REWARDS),
    Field(
        "reward_outcome",
        "(B,)",
        "object: Outcome",
        "the grade of a row that was graded while others were still being written",
        _ROLLOUT,
        _TRAINER,
    ),
    Field(
        "reward_extra",
        "(B,)",
        "object: dict",
        "what graders say beside the score, `reward_error` among it",
        _TRAINER,
        _TRAINER + _ALGORITHMS,
    ),
    Field("reward_error", "(B,)", "object: str", "why the grader failed; empty where it did not", _REWARDS, _TRAINER),
)

FIELDS: dict[str, Field] = {field.name: field for field in (*_TENSORS, *_OBJECTS)}


def render_fields() -> str:
    """The table as Markdown: tensors first, then objects."""
    lines = []
    for title, fields in (("Tensors (`batch`)", _TENSORS), ("Objects (`non_tensor_batch`)", _OBJECTS)):
        lines += [
            f"### {title}",
            "",
            "| column | shape | dtype | meaning | written by | read by |",
            "|---|---|---|---|---|---|",
        ]
        for field in fields:
            written, read = ", ".join(field.written_by), ", ".join(field.read_by)
            lines.append(f"| `{field.name}` | {field.shape} | {field.dtype} | {field.unit} | {written} | {read} |")
        lines.append("")
    return "\n".join(lines)
