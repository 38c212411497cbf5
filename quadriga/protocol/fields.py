# SPDX-License-Identifier: Apache-2.0
"""Every column of the training loop: name, shape, dtype, unit, who writes it, who reads it.

This is the one table; `render_fields()` makes the page of the documentation out of it, and a test
compares it with the columns that the code touches.

Legend: B rows (sequences), P prompt positions, T response positions, L = P + T. Prompts are padded on
the left, responses on the right.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A column: key, shape in the letters of the legend, torch dtype or what an object array holds, what a value
    means, and the packages of quadriga that write and read it.
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


# name | shape | dtype | written by | read by, and below it the unit.
_TENSORS = """
input_ids | (B, P), from the rollout on (B, L) | int64 | data rollout | rollout engines
    token id; pad id on padding; as many image tokens as the model has embeddings of the image
attention_mask | (B, P), from the rollout on (B, L) | int64 | data rollout | rollout rewards engines trainer
    1 on tokens, 0 on padding
position_ids | (B, P), from the rollout on (B, L); or (B, 3, P), (B, 3, L) | int64 | data rollout | rollout engines
    position of the token, 0 on left padding; of vision-language models on the axes time, height, width
prompts | (B, P) | int64 | rollout | rewards engines trainer
    token id, padded on the left
responses | (B, T) | int64 | rollout | rewards engines trainer
    token id, padded on the right
response_mask | (B, T) | int64 | rollout | rewards engines trainer algorithms
    1 on tokens that the model generated, 0 on padding, tool and user tokens
rollout_log_probs | (B, T) | float32 | rollout | trainer engines algorithms
    nats: log-probability under the policy that sampled, at its temperature
old_log_probs | (B, T) | float32 | workers | trainer engines algorithms
    nats: log-probability by the training engine before the update
ref_log_prob | (B, T) | float32 | workers | trainer engines algorithms
    nats: log-probability under the reference policy
entropys | (B, T) | float32 | workers | trainer
    nats: entropy of the next-token distribution
sum_pi_squared | (B, T) | float32 | workers | algorithms
    probability of drawing the same next token twice, before the update: its square, summed over the vocabulary
values | (B, T) | float32 | workers | trainer engines algorithms
    reward: the critic's estimate of the return
token_level_scores | (B, T) | float32 | trainer | trainer algorithms
    reward as graded, at the last token of the response
token_level_rewards | (B, T) | float32 | trainer | algorithms
    reward after the KL penalty; without one, the scores
reward_baselines | (B,) | float32 | trainer | algorithms
    reward of the greedy response to the same prompt
rm_scores | (B, T) | float32 | workers | trainer
    reward by the reward model, at the last token of the response
rollout_is_weights | (B, T) | float32 | trainer | algorithms engines
    importance weight of trainer over rollout
covariance_clipped | (B, T) | float32 | engines | algorithms
    1 on tokens that the loss clip_cov leaves out
covariance_top | (B, T) | float32 | engines | algorithms
    1 on tokens that the loss kl_cov holds near the old policy
advantages | (B, T) | float32 | trainer | engines
    reward above expectation, as the estimator scales it
returns | (B, T) | float32 | trainer | engines
    reward to come from this token on
loss_mask | (B, L) | int64 | data | trainer
    1 on tokens that are trained on, in supervised fine-tuning
score_slope | (B,) | float32 | trainer | engines
    derivative of the loss by the row's score
row_index | (B,) | int64 | trainer | engines trainer
    number of the row in the whole batch, before its rows were ordered for the ranks
"""

_OBJECTS = """
uid | (B,) | object: str | trainer | rollout workers trainer algorithms
    one per prompt, shared by its responses
sample_index | (B,) | object: int | trainer | rollout
    number of the response among those to its prompt
raw_prompt_ids | (B,) | object: list[int] | data | rollout
    token ids of the prompt, without padding, and one token for each image
raw_prompt | (B,) | object: list[dict] | data | rollout workers
    messages of the prompt
data_source | (B,) | object: str | data | rollout rewards trainer
    name of the data set; chooses the grader
reward_model | (B,) | object: dict | data | rollout rewards trainer
    how the response is graded: style, ground_truth
extra_info | (B,) | object: dict | data | rollout rewards
    what the row brings along: split, ...
index | (B,) | object: int or str | data | trainer
    number of the row in its data set
source_row | (B,) | object: str | data | rewards
    file and number of the row, for errors
agent_name | (B,) | object: str | data | rollout
    name of the loop that leads the row's conversation
tools_kwargs | (B,) | object: dict | data | rollout
    arguments of the row's tools
interaction_kwargs | (B,) | object: dict | data | rollout
    arguments of the row's simulated user
multi_modal_data | (B,) | object: dict[str, list[PIL.Image]] | data | rollout
    under `images` those of the prompt, in its order; empty without any; shared by the responses to a prompt
multi_modal_inputs | (B,) | object: dict[str, tensor] | data | rollout engines
    as the model takes the images: `pixel_values` (patches, values) float32, `image_grid_thw` (images, 3) int64
full_prompts | (B,) | object: str | data | trainer
    the prompt as text, after the chat template
num_turns | (B,) | object: int | rollout | rewards trainer
    turns of the conversation after the prompt
finish_reason | (B,) | object: str | rollout | rewards trainer
    why the conversation ended: stop, length, ...
tool_rewards | (B,) | object: dict | rollout | rewards
    by the name of a tool, what its use earned
turn_scores | (B,) | object: list[float] | rollout | rewards
    what the simulated user gave, in order
reward_outcome | (B,) | object: Outcome | rollout | trainer
    the grade of a response that was graded while others were still being written
reward_extra | (B,) | object: dict | trainer | trainer algorithms
    what graders return in addition to the score, `reward_error` among it
reward_error | (B,) | object: str | rewards | trainer
    why the grader failed; empty where it did not
"""


FIELDS: dict[str, Field] = {}
for _lines in (_TENSORS.strip().splitlines(), _OBJECTS.strip().splitlines()):
    for _row, _unit in zip(_lines[::2], _lines[1::2], strict=True):
        _name, _shape, _dtype, _writers, _readers = (cell.strip() for cell in _row.split("|"))
        FIELDS[_name] = Field(_name, _shape, _dtype, _unit.strip(), tuple(_writers.split()), tuple(_readers.split()))


def render_fields() -> str:
    """The table as Markdown: tensors first, then objects."""
    lines = []
    for title, is_tensor in (("Tensors (`batch`)", True), ("Objects (`non_tensor_batch`)", False)):
        lines += [
            f"### {title}",
            "",
            "| column | shape | dtype | meaning | written by | read by |",
            "|---|---|---|---|---|---|",
        ]
        for field in FIELDS.values():
            if field.is_tensor == is_tensor:
                written, read = ", ".join(field.written_by), ", ".join(field.read_by)
                lines.append(f"| `{field.name}` | {field.shape} | {field.dtype} | {field.unit} | {written} | {read} |")
        lines.append("")
    return "\n".join(lines)
