"""Train a GPT with any position scheme, and measure it at and past its training length.

python train.py pos=rope                            what this machine can do: preset=cpu or preset=gpu
python train.py -m pos=learned,rope seed=0,1        four runs, one after the other
torchrun --nproc-per-node 2 train.py pos=rope       data parallel: the same run on two devices
python train.py resume=outputs/<run>                go on with an interrupted run
"""

import contextlib
import inspect
import logging
import math
import os
import signal
import time
from pathlib import Path

import hydra
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data import DataConfig, TokenFiles, draw_batch, draw_positions, get_tokenizer, prepare
from measure import Report, Scoring, Text, measure, with_error
from measure.answers import AnswerReport, match_with_interval, measure_task
from measure.report import log_curve
from measure.windows import default_lengths, default_stride
from model import GPT, GPTConfig
from model.checkpoint import latest_checkpoint, load_state, load_weights, prune_checkpoints, save_checkpoint
from runs import devices, processes, tracking
from runs import folder as run_folder
from runs.settings import TrainConfig, check_settings, checked, lr_at, scheme_name, task_of

log = logging.getLogger("ropewalk")


class AdamW(torch.optim.AdamW):
    """torch's AdamW without decorators that import torch's compiler: a launch reaches its first step 1 s sooner."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Trainer:
    """One run: model, optimiser and data, from the step its last checkpoint was written at to max_steps."""

    def __init__(self, config: DictConfig, gpt_config: GPTConfig, folder: Path, ranks: processes.Ranks):
        self.config, self.folder, self.ranks, t = config, folder, ranks, config.train
        self.device = devices.pick_device(config.device, ranks.local_rank)
        self.precision = devices.pick_precision(config.precision, self.device)
        self.autocast = devices.autocast(self.device, self.precision)
        devices.set_numerics(t.tf32 and self.device.type == "cuda", config.deterministic)
        log.info(f"device   {self.device}, {self.precision}, {ranks.world_size} process(es), preset={config.preset}")
        self.task, self.solved = task_of(config), False
        self.step_tokens = t.batch_size * (self.task.width if self.task else config.model.train_length)  # with padding
        self.source = self.task or self._open_text()
        log.info("data     %s", self.source.summary)

        self.step, self.saved, state = 0, None, {}  # saved: the step of the last checkpoint
        if config.resume:
            weights = ranks.share(latest_checkpoint(folder) if ranks.first else None)
            self.model, state = load_weights(weights), load_state(weights)
            self.step = self.saved = state["step"]
            log.info("resume   %s, step %d of %d", folder, self.step, t.max_steps)
            if self.step > t.max_steps:
                raise ValueError(f"train.max_steps={t.max_steps}: {folder} is at step {self.step} already")
            if state["fingerprint"] != self.source.fingerprint:
                raise ValueError(f"resume={folder}: was trained on data {state['fingerprint']}, not on this")
        else:
            torch.manual_seed(config.seed)
            self.model = GPT(gpt_config)
            if config.init_from:
                run_folder.start_from(self.model, Path(config.init_from).expanduser())
        self.pending = [*state.get("pending", [])]  # since the last row of metrics: (step, loss, gradient norm)
        length, flops = config.model.train_length, self.model.flops_per_token(self.step_tokens // t.batch_size)
        size, own = (sum(p.numel() for p in part.parameters()) for part in (self.model, self.model.pos))
        about = f"{size:,} parameters ({own:,} for positions), {flops / 1e6:.1f} MFLOP per token, train length {length}"
        log.info("model    %s: %s", scheme_name(config), about)
        peak = devices.peak_flops(self.device, t.peak_flops)
        self.mfu_of_rate = peak and 3 * flops / (peak * ranks.world_size)  # the pass backward costs two passes forward

        self.sharded = config.sharding == "fsdp"
        if self.sharded:
            processes.shard(self.model, self.device, self.precision)
        self.model.to(self.device).train()
        groups = self.model.optimizer_groups(t.weight_decay, t.pos_lr_ratio)
        self.optimizer = AdamW(groups, betas=(t.beta1, t.beta2), fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        if state:
            processes.load_optimizer(self.optimizer, state["optimizer"], self.sharded)
            if state["scaler"]:  # empty but for fp16
                self.scaler.load_state_dict(state["scaler"])
        self.forward = self._forward()

    def _open_text(self) -> TokenFiles:
        """The corpus; what of it is scored, at those of the lengths that it holds. ValueError if it is too short."""
        tokenizer, data_config = get_tokenizer(**self.config.tokenizer), DataConfig(**self.config.data)
        self.files = files = self.ranks.in_turn(lambda: prepare(data_config, tokenizer, say=log.info))
        about = {"corpus": files.meta["corpus"], "fingerprint": files.fingerprint, "tokenizer": tokenizer.name}
        self.text = Text(files.val, files.val_offsets, tokenizer.bytes_per_token, about)
        train_length, val = self.config.model.train_length, self.config.val
        if min(len(files.train), len(files.val)) <= train_length:
            found = f"{len(files.train)} training and {len(files.val)} validation tokens"
            raise ValueError(f"model.train_length={train_length}: a window and its target do not fit into {found}")
        lengths = [n for n in default_lengths(train_length, [1, *val.multiples]) if n < len(files.val)]
        stride = val.stride or default_stride(train_length, lengths)
        self.scoring = Scoring(tuple(lengths), stride=stride, max_windows=val.max_windows)
        self.scoring.pieces(self.text)  # refuses what does not fit the text
        return files

    def _forward(self) -> nn.Module:
        """The model as it is called in training: compiled, and averaging gradients over the processes."""
        t, forward = self.config.train, self.model
        if t.compile is True or (t.compile == "auto" and self.device.type in devices.COMPILED and not self.sharded):
            forward = torch.compile(self.model)
        if t.compile == "auto" and forward is not self.model:
            inputs, targets = (part[: t.micro_batch_size] for part in self._batch())
            agree = devices.compare_compiled(self.model, forward, inputs, targets, self.autocast)
            forward = forward if self.ranks.share(agree) else self.model
        if self.ranks.world_size > 1 and not self.sharded:
            forward = torch.nn.parallel.DistributedDataParallel(forward)
        return forward

    def train(self) -> float:
        """Train to the end; returns what _evaluate does.

        SIGINT and SIGTERM end it by SystemExit, after the step at hand and once its checkpoint is written.
        """
        t, began = self.config.train, self.step
        with contextlib.ExitStack() as outputs:
            self.signals = outputs.enter_context(processes.noted_signals())
            if self.ranks.first:
                self._open_outputs(outputs)
            hidden = None if self.ranks.first else True  # None: where there is no terminal
            bar = outputs.enter_context(tqdm(total=t.max_steps, initial=self.step, unit="step", disable=hidden))
            outputs.enter_context(logging_redirect_tqdm([logging.getLogger()]))
            # A checkpoint is written before its step is measured, so a resumed run measures first.
            score = self._evaluate() if self.step and self._due(t.eval_every) else math.nan
            clock, counted = time.perf_counter(), self.step
            while self.step < t.max_steps and not self.solved:
                self._update()
                self.step += 1
                bar.update()
                measured, checkpoint = self._due(t.eval_every), self._due(t.checkpoint_every)
                noted = measured or checkpoint or self.step % t.log_every == 0
                if noted:
                    steps, self.pending = self._finite_steps(), []
                    loss = sum(loss for _, loss, _ in steps) / len(steps)
                    row = {"train/loss": loss, "train/lr": lr_at(self.step - 1, t), "train/grad_norm": steps[-1][2]}
                    rate = (self.step - counted) * self.step_tokens / (time.perf_counter() - clock)
                    row |= {"speed/tokens_per_second": rate, "speed/mfu": self.mfu_of_rate and rate * self.mfu_of_rate}
                    self._record(row)
                    bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
                    if counted == began + 1:
                        minutes, seconds = divmod(round((t.max_steps - self.step) * self.step_tokens / rate), 60)
                        words = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
                        log.info("time     about %s of training on this machine", words)
                if checkpoint:
                    self._checkpoint()
                self._stop_if_asked()
                if measured:
                    score = self._evaluate()
                if noted or self.step == began + 1:  # the first step also starts the device
                    clock, counted = time.perf_counter(), self.step
        return score

    def _update(self) -> None:
        """One optimiser step over the global batch. Its mean loss and gradient norm stay on the device, `pending`."""
        c, t = self.config, self.config.train
        # All randomness of a step is a function of (seed, step, rank): a resumed run needs no generator states.
        torch.manual_seed(int(np.random.SeedSequence([c.seed, self.step, self.ranks.rank]).generate_state(1)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.step, t) * group.get("lr_ratio", 1)
        inputs, targets = self._batch()
        micro = t.micro_batch_size or len(inputs)
        parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
        if self.task and self.task.random_offset:
            positions = self.task.positions(c.seed, self.step)
        else:
            positions = draw_positions(inputs.shape[1], t.position_range, c.seed, self.step)
        scored, loss = self.step_tokens, torch.zeros((), device=self.device)
        if self.task:
            scored = self.ranks.add_up((targets != -100).sum())
            if self.device.type == "cpu":  # the padding of short strings need not be computed
                ends = [int((y != -100).nonzero()[:, 1].max()) + 1 for _, y in parts]
                parts = [(x[:, :end], y[:, :end]) for (x, y), end in zip(parts, ends, strict=True)]
        for i, (x, y) in enumerate(parts):
            at = None if positions is None else torch.from_numpy(positions[: x.shape[1]])
            with processes.averaging(self.forward, last=i == len(parts) - 1):
                with self.autocast:
                    nll = self.forward(x, targets=y, positions=at, scaling_length=inputs.shape[1])  # (micro, T)
                # A part's share of the mean over the global batch: the parts add up to one big batch, whatever their
                # number. The factor undoes the mean over processes.
                part = nll.sum() / scored
                self.scaler.scale(part * self.ranks.world_size).backward()
            loss += part.detach()
        self.ranks.add_up(loss)
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), t.grad_clip)
        self.pending.append((self.step, loss, norm.full_tensor() if self.sharded else norm))
        self.scaler.step(self.optimizer)
        self.model.pos.constrain()
        self.scaler.update()
        self.optimizer.zero_grad()

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the step at hand on the device, int64 (B, T), B this process' share of the batch."""
        c, cuda = self.config, self.device.type == "cuda"
        where = (c.train.batch_size, c.seed, self.step, self.ranks.rank, self.ranks.world_size)
        batch = self.task.batch(*where) if self.task else draw_batch(self.files.train, c.model.train_length, *where)
        tensors = (torch.from_numpy(np.ascontiguousarray(array)) for array in batch)
        return tuple((part.pin_memory() if cuda else part).to(self.device, non_blocking=True) for part in tensors)

    def _finite_steps(self) -> list[tuple[int, float, float]]:
        """What is pending, as numbers. ValueError, naming the last good checkpoint, if any is not finite."""
        steps = [(step, float(loss), float(norm)) for step, loss, norm in self.pending]
        for step, loss, norm in steps:
            # fp16's scaler skips a step whose gradient overflows: there, only the loss has to be finite.
            if not (math.isfinite(loss) and (math.isfinite(norm) or self.scaler.is_enabled())):
                good = "none" if self.saved is None else f"{self.folder}/checkpoint/step_{self.saved:06d}.safetensors"
                found = f"the loss is {loss}, the gradient norm {norm}; last good checkpoint: {good}"
                raise ValueError(f"step {step + 1}: {found}. Try a smaller train.lr or precision=fp32")
        return steps

    def _evaluate(self) -> float:
        """Measure, record, and report after the last step. Returns the loss at the training length, nats per token.

        Of a task it is the share of wrong answers in its first range.
        """
        about = {"run": self.config.name, "folder": str(self.folder), "checkpoint": f"step_{self.step:06d}"}
        about |= {"precision": self.precision, "seed": self.config.seed}
        if self.task:
            with self.autocast:
                found = self.ranks.share(measure_task(self.model, self.task, about))
            rows, right = found["rows"], found["rows"][0]["exact_match"] or 0.0
            score, self.solved = 1 - right, self.task.stop_at is not None and right >= self.task.stop_at
            row = {f"val/exact_match_{row['range']}": row["exact_match"] for row in rows}
            shown = ", ".join(f"{row['range']}: {match_with_interval(row)}" for row in rows)
            log.info("step %d  exact match at %s", self.step, shown)
        else:
            with self.autocast:  # measure() reports its progress in all processes at once
                (found,) = measure(self.model, self.text, self.scoring, about, self._stop_if_asked, self.ranks)
            rows, trained = found.rows, found.row(self.config.model.train_length)
            score = trained["nll"]
            row = {"val/loss": score} | {f"val/{key}": trained[key] for key in ("perplexity", "bits_per_byte")}
            row |= {f"val/perplexity_{at['length']}": at["perplexity"] for at in rows if at["nll"] is not None}
            shown = ", ".join(f"{row['length']}: {row.get('note') or with_error(row)}" for row in rows)
            log.info("step %d  validation perplexity at %s", self.step, shown)
        self._record(row)
        if self.solved:
            self._checkpoint()
        if self.ranks.first and (self.solved or self.step == self.config.train.max_steps):
            report = AnswerReport([found]) if self.task else Report([found])
            report.write(self.folder, html=False)
            log_curve(rows, "extrapolation/final", self._record, self.wandb)
            log.info("%s\n\n%s", report.text(), run_folder.next_commands(self.folder, self.config))
        return score

    def _checkpoint(self) -> None:
        """Write what a later process needs to go on from here, unless that was done already."""
        if self.saved == self.step:
            return
        pending = self._finite_steps()  # weights that are not finite must not be kept
        weights, optimizer = processes.whole(self.model.state_dict()), processes.whole(self.optimizer.state_dict())
        if self.ranks.first:
            state = {"step": self.step, "fingerprint": self.source.fingerprint, "pending": pending}
            state |= {"optimizer": optimizer, "scaler": self.scaler.state_dict()}
            save_checkpoint(self.folder, self.step, self.model.config, weights, state)
            prune_checkpoints(self.folder, self.config.train.keep, self.step)
        self.saved = self.step

    def _stop_if_asked(self, _: int = 0) -> None:
        """Where any process has got a signal, all of them write a checkpoint of the last step and stop."""
        if self.ranks.add_up(torch.tensor(len(self.signals))):
            self._checkpoint()
            log.warning("stopped at step %d; to go on: python train.py resume=%s", self.step, self.folder)
            raise SystemExit(128 + (*self.signals, signal.SIGTERM)[0])

    def _open_outputs(self, outputs: contextlib.ExitStack) -> None:
        """config.yaml and metrics.jsonl, of the first process; wandb is started by the first row."""
        here = run_folder.provenance(self.device) | {"precision": self.precision, "processes": self.ranks.world_size}
        if self.config.resume:
            prune_checkpoints(self.folder, self.config.train.keep, self.step)
            _, provenance = run_folder.read_run(self.folder)
            provenance["resumed"] = [*provenance.get("resumed", []), here]
        elif (self.folder / "config.yaml").exists():
            raise ValueError(f"{self.folder}: holds a run already; resume= it, delete it, or choose another folder")
        else:
            provenance = here | {"fingerprint": self.source.fingerprint}
            provenance["wandb_id"] = tracking.new_wandb_id(scheme_name(self.config))
        for left in self.folder.glob(".*.tmp"):  # by a process that was killed
            left.unlink()
        self.written = run_folder.write_run(self.folder, self.config, provenance)
        self.metrics, self.wandb = run_folder.MetricsFile(self.folder / "metrics.jsonl", self.step), None
        outputs.push(lambda kind, *_: self.wandb is not None and self.wandb.finish(exit_code=int(kind is not None)))

    def _record(self, row: dict) -> None:
        """Add a row to metrics.jsonl and, without what is None, to wandb, in the first process."""
        if not self.ranks.first:
            return
        row = {"step": self.step, "tokens": self.step * self.step_tokens, **row}
        self.metrics.write(row)
        if self.wandb is None:  # not before: it takes two seconds, which the first step need not wait for
            where = self.config.wandb, self.folder, self.written["provenance"]["wandb_id"], self.written
            self.wandb = tracking.start_wandb(*where, **tracking.wandb_identity(self.config, scheme_name(self.config)))
        self.wandb.log({key: value for key, value in row.items() if value is not None})

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.train.max_steps


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> float:
    """One run; a sweeper gets its validation loss at the training length."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)  # of the first process; the others have none
    with processes.errors_as_messages(), contextlib.ExitStack() as outputs:
        ranks = processes.join_processes(config.device)
        if ranks.first:
            outputs.enter_context(run_folder.log_file(folder))
        config = checked(config, TrainConfig)
        if config.resume:
            config = run_folder.resumed(config, list(hydra_config.overrides.task))
            folder = Path(config.resume).expanduser()
        config.data = DataConfig(**config.data)
        trainer = Trainer(config, check_settings(config, ranks.world_size), ranks.share(folder), ranks)
        log.info("run      %s", trainer.folder)
        return trainer.train()


if __name__ == "__main__":
    # Launchers that start processes of their own, such as submitit's, find the modules of this checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    main()
