"""Train a GPT with any position scheme, and measure it at and past its training length.

python train.py pos=rope                            what this machine can do: preset=cpu or preset=gpu
python train.py -m pos=learned,rope seed=0,1        four runs, one after the other
torchrun --nproc-per-node 2 train.py pos=rope       data parallel: the same run on two devices
python train.py resume=outputs/<run>                go on with an interrupted run
python train.py repeat=outputs/<run>                train it again, and say whether the numbers agree
"""

import contextlib
import logging
import math
import time
from pathlib import Path
from typing import NoReturn

import hydra
import numpy as np
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import runs
import speed
from data import DataConfig, TokenFiles, Tokenizer, absolute, draw_batch, get_tokenizer, prepare, window_starts
from eval import default_lengths, default_stride, log_curve
from measure.protocols import new_losses
from measure.report import Report
from measure.results import Job, Measurement, Scoring
from measure.tables import with_error
from model import GPT, GPTConfig
from model.checkpoint import (
    latest_checkpoint,
    load_state,
    load_weights,
    mark_best,
    prune_checkpoints,
    read_best,
    save_checkpoint,
    write_text,
)

log = logging.getLogger("ropewalk")
IMPORTS = speed.seconds_since_launch()

ConfigStore.instance().store(name="train_schema", node=runs.TrainConfig)


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


class Trainer:
    """One run: model, optimiser and data, from the step its last checkpoint was written at to max_steps."""

    def __init__(
        self, config: DictConfig, gpt_config: GPTConfig, folder: Path, ranks: runs.Ranks, stop: runs.Stop | None = None
    ):
        self.config, self.folder, self.ranks, self.stop = config, folder, ranks, stop or runs.Stop()
        self.launched: float | None = time.perf_counter()
        self.device = runs.pick_device(config.device, ranks.local_rank)
        self.precision = runs.pick_precision(config.precision, self.device)
        self.sharded = config.sharding == "fsdp"
        runs.check_sharding(config.sharding, self.device, self.precision, config.train.compile)
        if config.train.flex_attention:
            runs.check_flex(self.device, gpt_config, config.deterministic)
        runs.set_numerics(config.train.tf32 and self.device.type == "cuda", config.deterministic)
        if config.preset == "gpu" and self.device.type != "cuda":
            log.warning("preset=gpu is meant for a CUDA device, and this run uses %s: expect days", self.device)
        found = "a CUDA device is here" if torch.cuda.is_available() else "no CUDA device here"
        log.info("preset   %s (%s)", config.preset, found)
        log.info("device   %s, %s, %d process(es)", self.device, self.precision, ranks.world_size)

        self.tokenizer: Tokenizer = get_tokenizer(**config.tokenizer)
        data_config = DataConfig(**config.data)
        self.files = ranks.in_turn(lambda: prepare(data_config, self.tokenizer, say=log.info))
        corpus, tokens, documents = (self.files.meta[key] for key in ("corpus", "tokens", "documents"))
        log.info(
            f"data     {corpus}: {tokens['train']:,} training and {tokens['val']:,} validation tokens in "
            f"{documents['train']} and {documents['val']} documents, fingerprint {self.files.fingerprint}"
        )
        self.lengths = check_lengths(config, self.files)

        self.step, state = 0, {}
        if config.resume:
            with ranks.together():
                weights = ranks.share(latest_checkpoint(folder, resumable=True) if ranks.first else None)
            self.model, state = load_weights(weights), load_state(weights)
            self._check_resumable(weights, state)
            self.step = state["step"]
            log.info("resume   %s, from step %d of %d", weights, self.step, config.train.max_steps)
        else:
            torch.manual_seed(config.seed)
            self.model = GPT(gpt_config)
            if config.init_from:
                runs.start_from(self.model, Path(config.init_from).expanduser(), config.init_table)
        self.model.flex_attention = config.train.flex_attention
        self._say_model()
        peak = speed.peak_flops(self.device, config.train.peak_flops)
        self.peak = peak and peak * ranks.world_size
        self.flops = 3 * self.model.flops_per_token(config.model.train_length)  # backward: twice the forward pass
        if self.sharded:
            runs.shard(self.model, self.device, self.precision)
        else:
            self.model.to(self.device)
        self.model.train()
        t, groups = config.train, self.model.optimizer_groups(config.train.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        if state:
            runs.load_optimizer(self.optimizer, state, weights, self.sharded)
            self.scaler.load_state_dict(state["scaler"])
        # Losses of steps since the last row of metrics, (step, loss, gradient's norm), on the device; of a run stopped
        # between two rows, they are the first process'.
        self.pending = [
            (
                step,
                torch.tensor(loss if ranks.first else 0.0, device=self.device),
                torch.tensor(norm, device=self.device),
            )
            for step, loss, norm in state.get("pending", [])
        ]
        self.skipped, self.saved = state.get("skipped", 0), state.get("step")  # saved: step of the last checkpoint
        self.origin = runs.read_run(folder)[1] if config.resume else {}
        self.wandb_id = self.origin.get("wandb_id")
        if self.wandb_id is None and runs.wandb_mode(config.wandb.mode) != "disabled":
            self.wandb_id = runs.new_wandb_id()

        self.forward = torch.compile(self.model) if t.compile is True else self.model
        if ranks.world_size > 1 and not self.sharded:
            devices = [self.device.index] if self.device.type == "cuda" else None
            self.forward = torch.nn.parallel.DistributedDataParallel(self.forward, device_ids=devices)

    def _check_resumable(self, weights: Path, state: dict) -> None:
        kinds = {"step": int, "fingerprint": str, "optimizer": dict, "scaler": dict}
        if not isinstance(state, dict) or not all(isinstance(state.get(key), kind) for key, kind in kinds.items()):
            raise ValueError(f"{weights.with_suffix('.pt')}: not a training state of this program")
        if state["fingerprint"] != self.files.fingerprint:
            raise ValueError(
                f"resume={self.folder}: was trained on data {state['fingerprint']}, but {self.files.meta['corpus']} is "
                f"{self.files.fingerprint} here; going on would mix the two"
            )
        step, most = state["step"], self.config.train.max_steps
        if step > most or (step == most and runs.is_reported(self.folder, step)):
            raise ValueError(f"resume={self.folder}: its {step} steps are done; raise train.max_steps={most}")

    def _say_model(self) -> None:
        c = self.model.config
        of_scheme = sum(parameter.numel() for parameter in self.model.pos.parameters())
        log.info(
            f"model    {c.pos['name']}: {self.model.num_parameters():,} parameters ({of_scheme:,} for positions), "
            f"{c.n_layer} layers, {c.n_head} heads of {c.head_dim}, train length {c.train_length}, "
            f"{self.model.flops_per_token(c.train_length) / 1e6:.1f} MFLOP a token forward"
        )

    def _write_config(self) -> dict:
        """config.yaml: the settings as used, and where they were used. Refuses a folder that holds a run already."""
        path = self.folder / "config.yaml"
        plain = OmegaConf.to_container(self.config, throw_on_missing=True)
        plain |= {"resume": None, "trust": False}
        here = {**runs.provenance(), "device": str(self.device), "device_name": runs.device_name(self.device)}
        here |= {"threads": torch.get_num_threads(), "processes": self.ranks.world_size, "precision": self.precision}
        here |= {"fingerprint": self.files.fingerprint, "wandb_id": self.wandb_id}
        if self.config.resume:
            here = {**self.origin, "wandb_id": self.wandb_id, "resumed": [*self.origin.get("resumed", []), here]}
        plain["provenance"] = here
        try:
            write_text(path, OmegaConf.to_yaml(OmegaConf.create(plain)), new=not self.config.resume)
        except FileExistsError as error:
            raise ValueError(f"{self.folder}: holds a run already; resume= it, or choose another folder") from error
        return plain

    def train(self) -> float:
        """Train to the end; returns the validation loss at the training length (nats a token).

        Raises Stopped, once a checkpoint is written, where the process is asked to stop.
        """
        t, step_tokens = self.config.train, self.config.train.batch_size * self.config.model.train_length
        with contextlib.ExitStack() as outputs:
            if self.ranks.first:
                self._open_outputs(outputs)
            hidden = None if self.ranks.first else True  # None: where the output is no terminal
            bar = tqdm(total=t.max_steps, initial=self.step, unit="step", smoothing=0.05, disable=hidden)
            outputs.enter_context(bar)
            outputs.enter_context(logging_redirect_tqdm([logging.getLogger()]))
            profiled = self.config.profile and self.ranks.first
            profiler = outputs.enter_context(speed.profiler(self.folder, self.device)) if profiled else None
            outputs.enter_context(self.stop.deferred())
            # A checkpoint is written before its step is measured, so a resumed run measures first.
            nll = self._evaluate() if self.step and self._is_measured(self.step) else math.nan
            start, clock, counted = {}, time.perf_counter(), self.step
            while self.step < t.max_steps:
                self._update()
                self.step += 1
                bar.update()
                if profiler:
                    profiler.step()
                if self.launched is not None:
                    if self.pending:
                        float(self.pending[0][1])  # on a GPU, the step is done only when its loss is there
                    start = {"speed/seconds_to_first_step": IMPORTS + time.perf_counter() - self.launched}
                    log.info("start    %.1f s from launch to the end of the first step", *start.values())
                    self.launched = None
                measured, at_end = self._is_measured(self.step), self.step == t.max_steps
                checkpoint = self.step % t.checkpoint_every == 0 or at_end
                noted = self.step % t.log_every == 0 or measured or checkpoint
                if noted:
                    row = self._read()
                    rate = (self.step - counted) * step_tokens / (time.perf_counter() - clock)
                    bar.set_postfix_str(
                        f"loss {row['train/loss'] or math.nan:.3f}, {rate:,.0f} tokens/s", refresh=False
                    )
                    mfu = None if self.peak is None else rate * self.flops / self.peak
                    self._record({**row, **start, "speed/tokens_per_second": rate, "speed/mfu": mfu})
                    start = {}
                if checkpoint:
                    self._checkpoint()
                self._stop_if_asked()
                if measured:
                    nll = self._evaluate()
                if noted:  # what came since the row is no training
                    clock, counted = time.perf_counter(), self.step
        return nll

    def _is_measured(self, step: int) -> bool:
        return step % self.config.train.eval_every == 0 or step == self.config.train.max_steps

    def _stop_if_asked(self) -> None:
        """Where any process has got a signal, all of them write a checkpoint of the last step and stop."""
        if signum := self.ranks.largest(self.stop.signum):
            self._checkpoint()
            raise runs.Stopped(signum)

    def _open_outputs(self, outputs: contextlib.ExitStack) -> None:
        c = self.config
        for left in self.folder.glob(".*.tmp"):  # by a process that was killed
            left.unlink(missing_ok=True)
        about = {**runs.wandb_identity(c), "config": self._write_config()}
        self.metrics = runs.MetricsFile(self.folder / "metrics.jsonl", self._is_kept)
        self.wandb = runs.start_wandb(c.wandb, self.folder, self.wandb_id, self.metrics.path, **about)
        outputs.enter_context(self.wandb)

    def _is_kept(self, row: dict) -> bool:
        """Whether a row of metrics.jsonl was written before the checkpoint this run goes on from."""
        again = self._is_measured(self.step) and "train/loss" not in row
        return row["step"] < self.step or (row["step"] == self.step and not again)

    def _update(self) -> None:
        """One optimiser step over the global batch. Its mean loss and gradient's norm stay on the device, `pending`."""
        c, t = self.config, self.config.train
        # All randomness of a step is a function of (seed, step, rank): a resumed run needs no generator states.
        torch.manual_seed(int(np.random.SeedSequence([c.seed, self.step, self.ranks.rank]).generate_state(1)[0]))
        lr = lr_at(self.step, t)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        where = (c.seed, self.step, self.ranks.rank, self.ranks.world_size)
        batch = draw_batch(self.files.train, c.model.train_length, t.batch_size, *where)
        inputs, targets = map(self._to_device, batch)  # (B, T) each, B this process' share of the batch
        micro = t.micro_batch_size or len(inputs)
        parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
        loss = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(parts):
            with runs.averaging(self.forward, self.sharded, last=i == len(parts) - 1):
                with runs.autocast(self.device, self.precision):
                    nll = self.forward(x, targets=y)  # (micro, T)
                # A part's share of the mean over the global batch: the parts add up to one big batch, whatever their
                # number. The factor undoes the mean over processes.
                part = nll.sum() / (t.batch_size * c.model.train_length)
                self.scaler.scale(part * self.ranks.world_size).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), t.grad_clip)
        norm = norm.full_tensor() if self.sharded else norm
        if t.skip_bad_steps and self._left_out(loss, norm):  # looking at every step has a GPU wait each time
            log.warning("step %d is left out; see %s", self.step + 1, self.folder / "bad_steps.jsonl")
        else:
            self.scaler.step(self.optimizer)
            self.pending.append((self.step, loss, norm))
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _left_out(self, loss: torch.Tensor, norm: torch.Tensor) -> bool:
        """Whether this step must not be made. ValueError where so many were left out already."""
        ((step, *values),) = self._fetch([(self.step, loss, norm)])
        bad = self._what_is_bad(*values)
        if bad and self.skipped == self.config.train.skip_bad_steps:
            self._refuse(step, bad)
        elif bad:
            self.skipped += 1
            self._note_bad(step, bad)
        return bool(bad)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def _fetch(self, pending: list[tuple[int, torch.Tensor, torch.Tensor]]) -> list[tuple[int, float, float]]:
        """(step, mean loss of the global batch, gradient's norm) of steps, all at once; every process calls it."""
        if not pending:
            return []
        losses = torch.stack([loss for _, loss, _ in pending])
        if self.ranks.world_size > 1:
            dist.all_reduce(losses)
        norms = torch.stack([norm for *_, norm in pending])
        return list(zip([step for step, *_ in pending], losses.tolist(), norms.tolist(), strict=True))

    def _finite(self) -> list[tuple[int, float, float]]:
        """What is pending. ValueError if a loss of it, or a gradient, is not finite."""
        steps = self._fetch(self.pending)
        for step, *values in steps:
            if bad := self._what_is_bad(*values):
                self._refuse(step, bad)
        return steps

    def _read(self) -> dict:
        """A row of metrics of the steps since the last one."""
        steps, self.pending = self._finite(), []
        loss = sum(loss for _, loss, _ in steps) / len(steps) if steps else None
        row = {"train/loss": loss, "train/lr": self.optimizer.param_groups[0]["lr"]}
        row["train/grad_norm"] = steps[-1][2] if steps else None
        return row | ({"train/skipped_steps": self.skipped} if self.config.train.skip_bad_steps else {})

    def _what_is_bad(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        # fp16's scaler skips steps whose gradient overflows: there, only the loss has to be finite
        return None if math.isfinite(norm) or self.scaler.is_enabled() else f"gradient's norm is {norm}"

    def _note_bad(self, step: int, bad: str) -> None:
        """bad_steps.jsonl: where the windows of the step's batch begin in the training tokens, to look at them."""
        if self.ranks.first:
            c, path = self.config, self.folder / "bad_steps.jsonl"
            starts = window_starts(len(self.files.train), c.model.train_length, c.train.batch_size, c.seed, step)
            noted = runs.MetricsFile(path, lambda row: row["step"] <= step)  # others belong to an interrupted process
            noted.write({"step": step + 1, "found": bad, "window_starts": starts.tolist()})

    def _refuse(self, step: int, bad: str) -> NoReturn:
        self._note_bad(step, bad)
        try:
            good = f"the checkpoint before it is {latest_checkpoint(self.folder)}"
        except (FileNotFoundError, ValueError):
            good = "there is no whole checkpoint"
        raise ValueError(
            f"step {step + 1}: the {bad}; {good}, and the batch is in {self.folder / 'bad_steps.jsonl'}. Try a smaller "
            "train.lr, a longer train.warmup_steps or precision=fp32; train.skip_bad_steps leaves some out"
        )

    def _evaluate(self) -> float:
        """Validation loss at the training length, recorded for all lengths; the best step's checkpoint is kept.

        After the last step it is the run's report as well, whose file is the sign that nothing is left to do.
        """
        measurement = self._measure()
        nll = measurement.row(self.config.model.train_length)["nll"]
        best = read_best(self.folder)
        # A best step that is still to come, or is this one, was noted before the run was interrupted.
        is_best = math.isfinite(nll) and (best is None or nll < best[1] or best[0] >= self.step)
        if self.ranks.share(is_best):
            self._checkpoint()
            if self.ranks.first:
                mark_best(self.folder, self.step, nll)
                prune_checkpoints(self.folder, self.config.train.keep, self.step)
        if self.ranks.first and self.step == self.config.train.max_steps:
            log_curve(measurement.result, "extrapolation/final", self._record, self.wandb)
            report = Report([measurement])
            report.write(self.folder, html=False)
            for line in report.text().splitlines():
                log.info("%s", line)
        return nll

    def _measure(self) -> Measurement:
        """Validation at all lengths, by all processes."""
        c = self.config
        stride = c.val.stride or default_stride(c.model.train_length, self.lengths)
        scoring = Scoring(tuple(self.lengths), stride=stride, max_targets=c.val.max_targets)
        job = Job(self.model.config, self.files, self.tokenizer, scoring)
        with runs.autocast(self.device, self.precision):
            losses, stop = new_losses(job.plan), lambda tokens: self._stop_if_asked()
            job.score(self.model, losses, done=stop, ranks=self.ranks)
        about = {"run": c.name, "folder": str(self.folder), "checkpoint": f"step_{self.step:06d}"}
        about |= {"trained_on": self.files.fingerprint, "precision": self.precision}
        (measurement,) = job.measurements(losses, about)
        rows = measurement.result["rows"]
        shown = ", ".join(f"{row['length']}: {with_error(row)}" for row in rows)
        log.info("step %d  validation perplexity at %s", self.step, shown)
        at_train = measurement.row(c.model.train_length)
        curve = {f"val/perplexity_{row['length']}": row["perplexity"] for row in rows if row["nll"] is not None}
        at_length = {f"val/{key}": at_train[key] for key in ("perplexity", "bits_per_byte")}
        self._record({"val/loss": at_train["nll"], **at_length, **curve})
        return measurement

    def _record(self, row: dict) -> None:
        if self.ranks.first:
            tokens = self.step * self.config.train.batch_size * self.config.model.train_length
            row = {"step": self.step, "tokens": tokens, **row}
            self.metrics.write(row)
            self.wandb.log(row)

    def _checkpoint(self) -> None:
        """Write what a later process needs to go on from here, unless that was done already."""
        if self.saved == self.step:
            return
        pending = self._finite()  # weights that are not finite must not be kept
        state = {"step": self.step, "fingerprint": self.files.fingerprint}
        state |= {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        state, whole, shards = state | {"pending": pending, "skipped": self.skipped}, None, None
        if self.sharded:
            state, shards = runs.write_shards(self.folder, self.step, state, self.ranks)
            whole = runs.whole_weights(self.model)
        with self.ranks.together():  # whatever time the first process takes
            if self.ranks.first:
                self.metrics.sync()
                save_checkpoint(self.folder, self.step, self.model, state, whole, shards)
                prune_checkpoints(self.folder, self.config.train.keep, self.step)
        self.saved = self.step


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> float:
    """One run; a sweeper gets its validation loss at the training length."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    with runs.clear_errors(folder), runs.Stop() as stop, contextlib.ExitStack() as held:
        trainer = None
        try:
            ranks = runs.join_processes(config.device)
            config = runs.checked(config, runs.TrainConfig)
            overrides = list(hydra_config.overrides.task)
            if config.resume:
                source = Path(config.resume).expanduser()
                config = runs.resumed_config(config, overrides)
                with ranks.together():
                    if ranks.first and (source / "config.yaml").exists() and source.resolve() != folder.resolve():
                        raise ValueError(f"hydra.run.dir={folder}: not with resume=, which goes on in {source}")
            elif config.repeat:
                config = runs.repeated_config(config, overrides)
            config = runs.from_source(config)
            config.data = absolute(DataConfig(**config.data))
            experiment = hydra_config.runtime.choices.get("experiment")
            if experiment and not config.resume:
                config.wandb.tags.append(f"experiment={experiment}")
            gpt_config = runs.check_settings(config, ranks)
            with ranks.together():
                if ranks.first:
                    held.enter_context(runs.only_one(folder))
            trainer = Trainer(config, gpt_config, Path(ranks.share(str(folder))), ranks, stop)
            log.info("run      %s", trainer.folder)
            nll = trainer.train()
        except KeyboardInterrupt as error:  # Stopped is one
            if trainer is None or trainer.saved is None:
                log.warning("interrupted before the first checkpoint")
            else:
                log.warning("stopped at step %d; to go on: python train.py resume=%s", trainer.saved, trainer.folder)
            raise SystemExit(getattr(error, "status", 130)) from None
        if config.repeat:
            source = Path(config.repeat).expanduser()
            agree, lines = ranks.share(runs.agreement(source, trainer.folder) if ranks.first else None)
            for line in lines:
                log.info("repeat   %s", line)
            log.info("repeat   %s: the numbers %s", config.repeat, "agree" if agree else "do not agree")
            if not agree:
                raise SystemExit(3)
        return nll


if __name__ == "__main__":
    with runs.entry(runs.TrainConfig), runs.all_jobs():
        main()
