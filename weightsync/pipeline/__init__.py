"""Pipelines from a YAML file: `weightsync run FILE.yaml`. Here is what a trainer class deals with."""

from weightsync.pipeline.trainer import Completion, Rollout, Trainer, Verdict

__all__ = ["Completion", "Rollout", "Trainer", "Verdict"]
