"""Why the hub gave nothing, in one line that ends with what helps."""

from __future__ import annotations


def explained(error: Exception, model: str, revision: str | None) -> str:
    """What an error of huggingface_hub means for whoever starts a server of `model`, and the cure.

    Pages are those of the hub that is asked, which may be a mirror (`HF_ENDPOINT`). It answers alike for a private
    repository and for one that does not exist. A gated one may list its files and refuse to give them.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{model}"
    has_token = get_token() is not None
    if isinstance(error, GatedRepoError):  # a kind of RepositoryNotFoundError
        if has_token:
            return (
                "the repository is gated and the account of the token in use has no access; accept the terms at "
                f"{page} with this account, or set HF_TOKEN to a token of another"
            )
        return f"the repository is gated; accept the terms at {page}, then set HF_TOKEN to a token of this account"
    if isinstance(error, RepositoryNotFoundError):
        found = (
            "the account of the token in use can read no such repository" if has_token else "it is private or absent"
        )
        return f"{found}; check the id at {page}, and for a private one set HF_TOKEN to a token that may read it"
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {revision}; give --revision one that {page}/commits lists"
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
        tokens = f"{constants.ENDPOINT}/settings/tokens"
        return f"the hub does not take the token in use; set HF_TOKEN to a valid one ({tokens})"
    command = f"longreach fetch {model}" + ("" if revision is None else f" --revision {revision}")
    what = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else _in_one_line(error)
    return f"{what}; where there is a network, run: {command}"


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
