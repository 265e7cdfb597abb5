"""Uploading to a model hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tr_args.constraints import RepositoryName, Secret
from tr_args.strategies import HubStrategy


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HubFields:
    """Uploading to a model hub."""

    _title = "Hub"

    push_to_hub: bool = False
    """Upload the model after training, and as hub_strategy says."""

    hub_model_id: Annotated[str | None, RepositoryName()] = None
    """Repository to upload to, as name or organization/name. Unset is the name of output_dir."""

    hub_strategy: HubStrategy = HubStrategy.EVERY_SAVE
    """What to upload, and when: end, every_save, checkpoint (also as last-checkpoint) or all_checkpoints."""

    hub_token: Annotated[str | None, Secret()] = field(default=None, repr=False)
    """Access token; never written to logs or files. Unset is the one the hub's own login stored."""

    hub_private_repo: bool | None = None
    """Create the repository as a private one. Unset is the organization's default."""

    hub_always_push: bool = False
    """Upload even if the upload before is not done yet."""

    hub_revision: str | None = None
    """Branch to upload to. Unset is the main branch."""
