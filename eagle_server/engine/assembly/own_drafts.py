"""MTP layers in the target's own files draft, where no option says what else should."""

from __future__ import annotations

import logging

from eagle_server.algorithms import NONE
from eagle_server.config import Config
from eagle_server.models.checkpoints.drafts import mtp_files
from eagle_server.models.checkpoints.drafts.load_draft import draft_files
from eagle_server.models.checkpoints.load_target import read_model_config
from eagle_server.models.checkpoints.weights import resolve_checkpoint
from eagle_server.models.config import CheckpointError

logger = logging.getLogger(__name__)


def with_own_drafts(config: Config) -> Config:
    """`config` with `--speculative-algorithm NEXTN`, if nothing drafts by its options and the target has MTP layers.

    Layers that cannot draft here are named in the log. The target's files are downloaded if they are not here.

    Raises:
        CheckpointError: the target's files cannot be read.
    """
    if config.speculates or config.speculative.algorithm == NONE:
        return config
    directory = resolve_checkpoint(config.target_path)
    files = draft_files(directory, directory)
    if not mtp_files.recognizes(files):
        return config
    try:
        mtp_files.check(files, read_model_config(directory))
    except CheckpointError as error:
        logger.warning("plain decoding: the target has MTP layers that cannot draft: %s", error)
        return config
    logger.info("the target's own MTP layers draft (NEXTN); --speculative-algorithm NONE is plain decoding")
    return config.model_copy(update={"speculative": config.speculative.model_copy(update={"algorithm": "NEXTN"})})
