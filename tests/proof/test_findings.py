"""How findings are judged and reported."""

import math

import torch

from titan_linear.proof.findings import by_token, difference, of_count, of_worst


def test_nan_is_the_worst_difference():
    """Wherever it is, and whatever is found after it."""
    a = torch.tensor([[[1.0], [torch.nan], [3.0]]])
    errors = dict(zip("abc", by_token(difference(a, torch.ones(1, 3, 1))).tolist()))
    assert errors == {"a": 0.0, "b": math.inf, "c": 2.0}
    found = of_worst("check", "what", errors, bound=3.0)
    assert (found.figure, found.where, found.holds) == (math.inf, "b", False)


def test_what_is_equal_has_no_place():
    assert of_worst("check", "what", {"a": 0.0}).where == of_worst("check", "what", {}).where == ""


def test_the_first_places_are_named_and_all_are_counted():
    places = ["a", "b", "c"]
    found = [of_count("check", "what", places, shown) for shown in (1, 2, 3)]
    assert [finding.where for finding in found] == ["a", "a, b and 1 more", "a, b, c"]
    assert {finding.figure for finding in found} == {3}
    assert of_count("check", "what", []).holds
