# SPDX-License-Identifier: Apache-2.0
"""How a reward model of the playground orders all answers to a question, not only those that it was trained on."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quadriga_recipes.playground_tasks import SUMS

ANSWERS = [str(number) for number in range(19)]


def ranking(folder: Path) -> dict[str, float]:
    """Of all sums: the share whose right answer scores highest of all 19, and of the three habits.

    Args:
        folder: of the reward model, with its tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    questions = range(10**SUMS.num_digits)
    scores = torch.empty(len(questions), len(ANSWERS))
    for number in questions:
        # Each by itself: no padding, so nothing depends on where a score is read.
        for place, answer in enumerate(ANSWERS):
            messages = [
                {"role": "user", "content": SUMS.text(number)},
                {"role": "assistant", "content": answer},
            ]
            tokens = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
            with torch.inference_mode():
                scores[number, place] = model(**tokens).logits[0, 0]
    return shares_of_best(scores)


def shares_of_best(scores: torch.Tensor) -> dict[str, float]:
    """See `ranking`.

    Args:
        scores: [questions, answers] of each answer to each sum.
    """
    best_of_all = best_of_habits = 0
    for number, row in enumerate(scores):
        right, *wrong = (int(answer) for answer in SUMS.answers(number))
        best_of_all += int(row.argmax()) == right
        best_of_habits += all(row[right] > row[answer] for answer in wrong if answer != right)
    return {
        "best of 19": best_of_all / len(scores),
        "best of the habits": best_of_habits / len(scores),
    }
