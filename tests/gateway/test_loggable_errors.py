"""What the log may have of an error's sentence: everything but what it quotes of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.errors import InferdError, InvalidRequest, ModelNotFound
from inferd.gateway.errors import RouteNotFound, loggable


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidRequest("The field 'model' is missing.", param="model"), "The field 'model' is missing."),
        (InvalidRequest("The model 'chat' cannot embed."), "The model 'chat' cannot embed."),
        (InvalidRequest("stop is 'my secret', not a list."), "stop is '...', not a list."),
        (InvalidRequest("stop is \"it's mine\", the server's limit is 4."), "stop is '...', the server's limit is 4."),
        (InvalidRequest("It holds {'type': 'secret"), "It holds {'...': '...'"),
        (ModelNotFound("There is no model 'nope'."), "There is no model 'nope'."),
        (RouteNotFound("There is nothing at '/v1/chatt'."), "There is nothing at '/v1/chatt'."),
    ],
)
def test_what_is_quoted_stays_only_where_it_is_a_name(error: InferdError, said: str) -> None:
    assert loggable(error, "chat") == said


@given(st.text(min_size=1).map(lambda text: f"canary{text}"), st.sampled_from([None, "chat"]))
def test_no_text_of_a_request_that_is_quoted_reaches_the_log(text: str, model: str | None) -> None:
    assert "canary" not in loggable(InvalidRequest(f"prompt is {text!r}; expected a list."), model)
    assert "canary" not in loggable(InvalidRequest(f"prompt holds {{'a': {text!r:.20}"), model)
