"""Train a GPT with any position scheme, and measure it at and past its training length.

python train.py pos=rope                            what this machine can do: preset=cpu or preset=gpu
python train.py -m pos=learned,rope seed=0,1        four runs, one after the other
torchrun --nproc-per-node 2 train.py pos=rope       data parallel: the same run on two devices
python train.py resume=outputs/<run>                go on with an interrupted run
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import hydra
import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data import DataConfig, TokenFiles, absolute, draw_batch, get_tokenizer, prepare
from eval import default_lengths, default_stride, log_curve
from measure import Measurement, Report, Scoring, Text, measure, with_error
from model import GPT, GPTConfig
from model.checkpoint import latest_checkpoint, load_state, load_weights, prune_checkpoints, save_checkpoint
from runs.devices import autocast, device_name, peak_flops, pick_device, pick_precision, profiler, set_numerics
from runs.folder import MetricsFile, fix_scaling, log_file, provenance, read_run, resumed, start_from, write_run
from runs.processes import (
    Ranks,
    Stop,
    averaging,
    errors_as_messages,
    join_processes,
    load_optimizer,
    shard,
    whole_state,
)
from runs.settings import TrainConfig, check_settings, checked
from runs.tracking import finish_wandb, log_row, new_wandb_id, start_wandb, wandb_identity

log = logging.getLogger("ropewalk")

COMPILED = ("cuda",)  # devices on which train.compile=auto compiles

ConfigStore.instance().store(name="train_schema", node=TrainConfig)


def check_lengths(config: DictConfig, files: TokenFiles) -> list[int]:
    """The lengths to evaluate. ValueError where a split is shorter than a training window; longer ones are left out."""
    train_length = config.model.train_length
    for split, tokens in (("training", files.train), ("validation", files.val)):
        if len(tokens) < train_length + 1:
            raise ValueError(
                f"model.train_length={train_length}: a window and its target do not fit into the {split} split of "
                f"{files.meta['corpus']}, which has {len(tokens)} tokens; use a shorter one or more text"
            )
    lengths = default_lengths(train_length, [1, *config.val.multiples])
    fitting = [length for length in lengths if length < len(files.val)]
    if fitting != lengths:
        left_out = ", ".join(str(length) for length in lengths if length not in fitting)
        log.warning("validation split of %d tokens: lengths %s are left out", len(files.val), left_out)
    if config.val.stride is not None and config.val.stride > min(fitting):
        raise ValueError(f"val.stride={config.val.stride}: must be at most the shortest length, {min(fitting)}")
    return fitting


def lr_at(step: int, t: DictConfig) -> float:
    """Learning rate of update number `step`, from 0: linear warm-up, then a cosine down to min_lr_ratio · lr."""
    if step < t.warmup_steps:
        return t.lr * (step + 1) / t.warmup_steps
    progress = (step - t.warmup_steps) / max(1, t.max_steps - 1 - t.warmup_steps)
    return t.lr * (t.min_lr_ratio + (1 - t.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def compare_compiled(
    model: GPT, compiled: Callable, inputs: Tensor, targets: Tensor, context: contextlib.AbstractContextManager
) -> bool:
    """Whether loss and gradient norm of a batch, ids (B, T), agree within 2 % between a model and its compiled form.

    If not, or where compiling fails, there is a warning. Gradients are cleared afterwards.
    """
    found = []
    try:
        for forward in (model, compiled):
            with context:
                loss = forward(inputs, targets=targets).mean()
            loss.backward()
            found.append(torch.stack([loss.detach(), clip_grad_norm_(model.parameters(), math.inf)]))
            model.zero_grad(set_to_none=True)
    except Exception as error:  # whatever a compiler or its tools happen to raise
        log.warning("train.compile=auto: torch.compile failed (%s); training goes on without it", error)
        model.zero_grad(set_to_none=True)
        return False
    (loss, norm), (other_loss, other_norm) = (values.tolist() for values in found)
    agree = math.isclose(loss, other_loss, rel_tol=0.02) and math.isclose(norm, other_norm, rel_tol=0.02)
    if not agree:
        log.warning(
            "train.compile=auto: the compiled model has loss %.4g and gradient norm %.4g on the first batch, the model "
            "itself %.4g and %.4g; training goes on without torch.compile", other_loss, other_norm, loss, norm
        )  # fmt: skip
    return agree


class Trainer:
    """One run: model, optimiser and data, from the step its last checkpoint was written at to max_steps."""

    def __init__(self, config: DictConfig, gpt_config: GPTConfig, folder: Path, ranks: Ranks):
        self.config, self.folder, self.ranks, t = config, folder, ranks, config.train
        self.device = pick_device(config.device, ranks.local_rank)
        self.precision = pick_precision(config.precision, self.device)
        self.sharded = config.sharding == "fsdp"
        set_numerics(t.tf32 and self.device.type == "cuda", config.deterministic)
        if config.preset == "gpu" and self.device.type != "cuda":
            log.warning("preset=gpu is meant for a CUDA device, and this run uses %s: expect days", self.device)
        log.info("preset   %s", config.preset)
        log.info("device   %s, %s, %d process(es)", self.device, self.precision, ranks.world_size)

        tokenizer, data_config = get_tokenizer(**config.tokenizer), DataConfig(**config.data)
        self.files = ranks.in_turn(lambda: prepare(data_config, tokenizer, say=log.info))
        corpus, tokens, documents = (self.files.meta[key] for key in ("corpus", "tokens", "documents"))
        log.info(
            f"data     {corpus}: {tokens['train']:,} training and {tokens['val']:,} validation tokens in "
            f"{documents['train']} and {documents['val']} documents, fingerprint {self.files.fingerprint}"
        )
        about = {"corpus": corpus, "fingerprint": self.files.fingerprint, "tokenizer": tokenizer.name}
        self.text = Text(self.files.val, self.files.val_offsets, tokenizer.bytes_per_token, about)
        self.lengths = check_lengths(config, self.files)

        self.step, state = 0, {}
        if config.resume:
            weights = Path(ranks.share(str(latest_checkpoint(folder)) if ranks.first else None))
            self.model, state = load_weights(weights), load_state(weights)
            self.step = self._check_resumable(weights, state)
        else:
            torch.manual_seed(config.seed)
            self.model = GPT(gpt_config)
            if config.init_from:
                start_from(self.model, Path(config.init_from).expanduser())
        c, of_scheme = self.model.config, sum(parameter.numel() for parameter in self.model.pos.parameters())
        flops = self.model.flops_per_token(c.train_length)
        log.info(
            f"model    {c.pos['name']}: {self.model.num_parameters():,} parameters ({of_scheme:,} for positions), "
            f"{c.n_layer} layers, {c.n_head} heads of {c.head_dim}, train length {c.train_length}, "
            f"{flops / 1e6:.1f} MFLOP a token forward"
        )
        peak = peak_flops(self.device, t.peak_flops)
        self.mfu_of_rate = peak and 3 * flops / (peak * ranks.world_size)  # the pass backward costs two passes forward

        if self.sharded:
            shard(self.model, self.device, self.precision)
        self.model.to(self.device).train()
        groups = self.model.optimizer_groups(t.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        if state:
            load_optimizer(self.model, self.optimizer, state["optimizer"], self.sharded)
            self.scaler.load_state_dict(state["scaler"])
        # Steps since the last row of metrics: (step, mean loss of the global batch, gradient norm), on the device.
        self.pending = [
            (step, *(torch.tensor(value, device=self.device) for value in values))
            for step, *values in state.get("pending", [])
        ]
        self.saved = state.get("step")  # the step of the last checkpoint
        self.provenance = read_run(folder)[1] if config.resume else {"wandb_id": new_wandb_id()}
        self.forward = self._forward()

    def _check_resumable(self, weights: Path, state: dict) -> int:
        """The step of a checkpoint. ValueError where this run cannot go on from it."""
        if state["fingerprint"] != self.files.fingerprint:
            raise ValueError(
                f"resume={self.folder}: was trained on data {state['fingerprint']}, but {self.files.meta['corpus']} is "
                f"{self.files.fingerprint} here; going on would mix the two"
            )
        step, most = state["step"], self.config.train.max_steps
        if step > most:
            raise ValueError(f"resume={self.folder}: has {step} steps; raise train.max_steps={most}")
        log.info("resume   %s, step %d of %d", weights, step, most)
        return step

    def _forward(self) -> nn.Module:
        """The model as it is called in training: compiled, and averaging gradients over the processes."""
        t, forward = self.config.train, self.model
        if t.compile is True or (t.compile == "auto" and self.device.type in COMPILED and not self.sharded):
            forward = torch.compile(self.model)
            if t.compile == "auto":
                inputs, targets = (part[: t.micro_batch_size] for part in self._batch())
                self.model.train(not self.model.config.dropout)  # dropout draws other numbers when compiled
                agree = compare_compiled(self.model, forward, inputs, targets, self._autocast())
                self.model.train()
                forward = forward if self.ranks.share(agree) else self.model
        if self.ranks.world_size > 1 and not self.sharded:
            devices = [self.device.index] if self.device.type == "cuda" else None
            forward = torch.nn.parallel.DistributedDataParallel(forward, device_ids=devices)
        return forward

    def train(self) -> float:
        """Train to the end; returns the validation loss at the training length (nats a token).

        SIGINT and SIGTERM end it by SystemExit, after the step at hand and once its checkpoint is written.
        """
        t, first = self.config.train, self.ranks.first
        with contextlib.ExitStack() as outputs:
            self.stop = outputs.enter_context(Stop())
            if first:
                self._open_outputs(outputs)
            hidden = None if first else True  # None: where the output is no terminal
            bar = tqdm(total=t.max_steps, initial=self.step, unit="step", smoothing=0.05, disable=hidden)
            outputs.enter_context(bar)
            outputs.enter_context(logging_redirect_tqdm([logging.getLogger()]))
            profiled = self.config.profile and first
            profile = outputs.enter_context(profiler(self.folder, self.device)) if profiled else None
            # A checkpoint is written before its step is measured, so a resumed run measures first.
            nll = self._evaluate() if self.step and self._due(t.eval_every) else math.nan
            clock, counted = time.perf_counter(), self.step
            while self.step < t.max_steps:
                self._update()
                self.step += 1
                bar.update()
                if profile:
                    profile.step()
                measured, checkpoint = self._due(t.eval_every), self._due(t.checkpoint_every)
                noted = measured or checkpoint or self.step % t.log_every == 0
                if noted:
                    row = self._row()
                    seconds, tokens = time.perf_counter() - clock, (self.step - counted) * self._tokens(1)
                    row["speed/tokens_per_second"] = rate = tokens / seconds
                    row["speed/mfu"] = self.mfu_of_rate and rate * self.mfu_of_rate
                    bar.set_postfix_str(f"loss {row['train/loss']:.3f}, {rate:,.0f} tokens/s", refresh=False)
                    self._record(row)
                if checkpoint:
                    self._checkpoint()
                self._stop_if_asked()
                if measured:
                    nll = self._evaluate()
                if noted:  # what came since the row is no training
                    clock, counted = time.perf_counter(), self.step
        return nll

    def _update(self) -> None:
        """One optimiser step over the global batch. Its mean loss and gradient norm stay on the device, `pending`."""
        c, t = self.config, self.config.train
        # All randomness of a step is a function of (seed, step, rank): a resumed run needs no generator states.
        torch.manual_seed(int(np.random.SeedSequence([c.seed, self.step, self.ranks.rank]).generate_state(1)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.step, t)
        inputs, targets = self._batch()
        micro = t.micro_batch_size or len(inputs)
        parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
        loss = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(parts):
            with averaging(self.forward, last=i == len(parts) - 1):
                with self._autocast():
                    nll = self.forward(x, targets=y)  # (micro, T)
                # A part's share of the mean over the global batch: the parts add up to one big batch, whatever their
                # number. The factor undoes the mean over processes.
                part = nll.sum() / self._tokens(1)
                self.scaler.scale(part * self.ranks.world_size).backward()
            loss += part.detach()
        self.ranks.add_up(loss)
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), t.grad_clip)
        self.pending.append((self.step, loss, norm.full_tensor() if self.sharded else norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the step at hand on the device, int64 (B, T), B this process' share of the batch."""
        c, device = self.config, self.device
        where = (c.seed, self.step, self.ranks.rank, self.ranks.world_size)
        batch = draw_batch(self.files.train, c.model.train_length, c.train.batch_size, *where)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in batch]
        if device.type == "cuda":
            return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
        return tuple(tensor.to(device) for tensor in tensors)

    def _row(self) -> dict:
        """A row of metrics of the steps since the last one."""
        steps, self.pending = self._finite_steps(), []
        losses = [loss for _, loss, _ in steps]
        lr = self.optimizer.param_groups[0]["lr"]
        return {"train/loss": sum(losses) / len(losses), "train/lr": lr, "train/grad_norm": steps[-1][2]}

    def _finite_steps(self) -> list[tuple[int, float, float]]:
        """What is pending, as numbers. ValueError, naming the last good checkpoint, if any is not finite."""
        if not self.pending:
            return []
        steps, *values = zip(*self.pending, strict=True)
        for step, loss, norm in (found := list(zip(steps, *(torch.stack(v).tolist() for v in values), strict=True))):
            # fp16's scaler skips a step whose gradient overflows: there, only the loss has to be finite.
            if not (math.isfinite(loss) and (math.isfinite(norm) or self.scaler.is_enabled())):
                good = "none" if self.saved is None else f"{self.folder}/checkpoint/step_{self.saved:06d}.safetensors"
                raise ValueError(
                    f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; last good checkpoint: {good}. Try "
                    "a smaller train.lr, a longer train.warmup_steps or precision=fp32"
                )
        return found

    def _evaluate(self) -> float:
        """Validation loss at the training length, recorded for all lengths; after the last step it is the report."""
        c = self.config
        stride = c.val.stride or default_stride(c.model.train_length, self.lengths)
        scoring = Scoring(tuple(self.lengths), stride=stride, max_targets=c.val.max_targets)
        about = {"run": c.name, "folder": str(self.folder), "checkpoint": f"step_{self.step:06d}"}
        about |= {"precision": self.precision, "seed": c.seed}
        with self._autocast():
            (measurement,) = measure(self.model, self.text, scoring, about, self._stop_if_alone, self.ranks)
        self.model.train()
        shown = ", ".join(f"{row['length']}: {with_error(row)}" for row in measurement.rows)
        log.info("step %d  validation perplexity at %s", self.step, shown)
        at_train = measurement.row(c.model.train_length)
        row = {"val/loss": at_train["nll"]} | {f"val/{key}": at_train[key] for key in ("perplexity", "bits_per_byte")}
        rows = [row for row in measurement.rows if row["nll"] is not None]
        self._record(row | {f"val/perplexity_{row['length']}": row["perplexity"] for row in rows})
        if self.ranks.first and self.step == c.train.max_steps:
            self._report(measurement)
        return at_train["nll"]

    def _report(self, measurement: Measurement) -> None:
        report = Report([measurement])
        report.write(self.folder, html=False)
        log_curve(measurement.rows, "extrapolation/final", self._record, self.wandb)
        for line in report.text().splitlines():
            log.info("%s", line)

    def _checkpoint(self) -> None:
        """Write what a later process needs to go on from here, unless that was done already."""
        if self.saved == self.step:
            return
        pending = self._finite_steps()  # weights that are not finite must not be kept
        weights, optimizer = whole_state(self.model, self.optimizer, self.sharded)
        if self.ranks.first:
            state = {"step": self.step, "fingerprint": self.files.fingerprint, "pending": pending}
            state |= {"optimizer": optimizer, "scaler": self.scaler.state_dict()}
            self.metrics.sync()
            save_checkpoint(self.folder, self.step, self.model.config, weights, state)
            prune_checkpoints(self.folder, self.config.train.keep, self.step)
        self.saved = self.step

    def _stop_if_asked(self) -> None:
        """Where any process has got a signal, all of them write a checkpoint of the last step and stop."""
        if signum := self.stop.asked(self.ranks):
            self._checkpoint()
            log.warning("stopped at step %d; to go on: python train.py resume=%s", self.step, self.folder)
            raise SystemExit(128 + signum)

    def _stop_if_alone(self, tokens: int) -> None:
        """In the middle of a measurement, whose parts several processes do not take in step."""
        if self.ranks.world_size == 1:
            self._stop_if_asked()

    def _open_outputs(self, outputs: contextlib.ExitStack) -> None:
        """config.yaml, metrics.jsonl and wandb, of the first process."""
        if (self.folder / "config.yaml").exists() and not self.config.resume:
            raise ValueError(f"{self.folder}: holds a run already; resume= it, or choose another folder")
        for left in self.folder.glob(".*.tmp"):  # by a process that was killed
            left.unlink()
        here = {**provenance(), "device": str(self.device), "device_name": device_name(self.device)}
        here |= {"threads": torch.get_num_threads(), "processes": self.ranks.world_size, "precision": self.precision}
        if self.config.resume:
            prune_checkpoints(self.folder, self.config.train.keep, self.step)
            self.provenance["resumed"] = [*self.provenance.get("resumed", []), here]
        else:
            self.provenance |= {**here, "fingerprint": self.files.fingerprint}
        plain = write_run(self.folder, self.config, self.provenance)
        self.metrics = MetricsFile(self.folder / "metrics.jsonl", self._is_kept)
        wandb_id, identity = self.provenance["wandb_id"], wandb_identity(self.config)
        self.wandb = start_wandb(self.config.wandb, self.folder, wandb_id, plain, **identity)
        outputs.push(lambda kind, *_: finish_wandb(self.wandb, failed=kind is not None))

    def _is_kept(self, row: dict) -> bool:
        """Whether a row of metrics.jsonl was written before the checkpoint this run goes on from."""
        again = self._due(self.config.train.eval_every) and "train/loss" not in row
        return row["step"] < self.step or (row["step"] == self.step and not again)

    def _record(self, row: dict) -> None:
        if self.ranks.first:
            row = {"step": self.step, "tokens": self._tokens(self.step), **row}
            self.metrics.write(row)
            self.wandb = log_row(self.wandb, row)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.train.max_steps

    def _tokens(self, steps: int) -> int:
        return steps * self.config.train.batch_size * self.config.model.train_length

    def _autocast(self) -> torch.autocast:
        return autocast(self.device, self.precision)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> float:
    """One run; a sweeper gets its validation loss at the training length."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    with errors_as_messages(), contextlib.ExitStack() as outputs:
        ranks = join_processes(config.device)
        if ranks.first:
            outputs.enter_context(log_file(folder))
        config = checked(config, TrainConfig)
        if config.resume:
            source = Path(config.resume).expanduser()
            config = resumed(config, list(hydra_config.overrides.task))
            if ranks.first and source.resolve() != folder.resolve():
                raise ValueError(f"hydra.run.dir={folder}: not with resume=, which goes on in {source}")
        else:
            fix_scaling(config)
            if experiment := hydra_config.runtime.choices.get("experiment"):
                config.wandb.tags.append(f"experiment={experiment}")
        config.data = absolute(DataConfig(**config.data))
        gpt_config = check_settings(config, ranks.world_size)
        trainer = Trainer(config, gpt_config, Path(ranks.share(str(folder))), ranks)
        log.info("run      %s", trainer.folder)
        return trainer.train()


if __name__ == "__main__":
    # Launchers that start processes of their own, such as submitit's, find the modules of this checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    main()
