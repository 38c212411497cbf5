# SPDX-License-Identifier: Apache-2.0
"""A tool with state: each conversation has an account of its own."""

from quadriga.rollout.agent_loop import Tool, ToolError


class Account(Tool):
    """A bank account; a sample may open it with `tools_kwargs={"account": {"create_kwargs": {"balance": 100}}}`."""

    def __init__(self, currency: str = "EUR") -> None:
        self.currency = currency

    def create(self, balance: float = 0.0) -> None:
        """Opens the account."""
        self.balance = balance

    def execute(self, amount: float) -> str:
        """Pay into the account, or take from it.

        Args:
            amount: what is paid in; below 0 it is taken out.
        """
        if self.balance + amount < 0:
            raise ToolError(f"account: there are only {self.balance:g} {self.currency}")
        self.balance += amount
        return f"There are {self.balance:g} {self.currency}."

    def calc_reward(self) -> float:
        """What is left."""
        return self.balance
