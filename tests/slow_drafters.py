"""The slow, obvious twin of every drafter of the EAGLE family: one chain, one column, one head at a time.

Nothing is cached and nothing is shared with the product beyond weights, by their names in a checkpoint: every step of a
chain is computed from scratch, from the definition, with the keys of all columns that it sees. Silu MLPs, default
rotary positions.
"""

import math
from typing import Any

import torch

from tests.reference import counted, objective, rank_likelihood, rms_norm, rope


def top_k_cross_entropy(logits: torch.Tensor, teacher: torch.Tensor, k: int) -> torch.Tensor:
    """Of one column: -sum of p_v log q_v over the k tokens with the largest p_v; q over all tokens, p as it is."""
    likeliest = sorted(range(len(teacher)), key=lambda v: -float(teacher[v]))[:k]
    normaliser = torch.log(sum((torch.exp(z) for z in logits), torch.zeros((), dtype=logits.dtype)))
    return sum((-teacher[v] * (logits[v] - normaliser) for v in likeliest), torch.zeros((), dtype=logits.dtype))


def smooth_l1(output: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
    """Of one column: the mean over the width of d^2 / 2 where |d| < 1, of |d| - 1/2 elsewhere."""
    total = torch.zeros((), dtype=output.dtype)
    for a, b in zip(output, feature, strict=True):
        distance = abs(a - b)
        total = total + (distance * distance / 2 if distance < 1 else distance - 0.5)
    return total / len(output)


class SlowDrafter:
    """A chain of any drafter.

    Args:
        weights: named as in a checkpoint.
        embedding: [V, H] the target's; head: [V, H] the target's, for drafters that have none of their own.
        config: the drafter's, for its sizes and flags.
    """

    def __init__(self, weights: dict[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor, config: Any):
        self.w, self.embedding, self.target_head, self.c = weights, embedding, head, config
        self.fused = "lm_head.weight" in weights  # EAGLE-3's features and head
        first = "midlayer" if self.fused else "layers.0"
        self.stacks = [[first, *(f"layers.{i}" for i in range(1, config.num_layers))]]
        self.positions_per_stack = 1
        if "specialists.0.self_attn.q_proj.weight" in weights:
            self.stacks = [[f"specialists.{i}"] for i in range(config.specialists)]
            self.positions_per_stack = config.positions_per_specialist

    def stack_of(self, step: int) -> int:
        """Each specialist has its positions; the last one also has all that follow."""
        stack = 0
        for position in range(step + 1):
            if position > 0 and position % self.positions_per_stack == 0 and stack + 1 < len(self.stacks):
                stack += 1
        return stack

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """A column's captured states to its feature."""
        if not self.fused:
            return captured
        if self.c.fc_norm:
            parts = captured.split(self.c.hidden_size)
            captured = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)])
        return self.linear("fc", captured)

    def feedback(self, output: torch.Tensor) -> torch.Tensor:
        return self.norm("norm", output) if self.fused and self.c.norm_output else output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return self.linear("lm_head", self.norm("norm", output)) if self.fused else self.target_head @ output

    def enter(self, layer: str, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(what attention reads, residual). `state`: (feature, token) below the first layer, an output above."""
        if not isinstance(state, tuple):
            return self.norm(f"{layer}.input_layernorm", state), state
        feature, token = state
        embedding = self.embedding[token] * self.c.embedding_scale
        if self.fused:
            parts = self.norm(f"{layer}.input_layernorm", embedding), self.norm(f"{layer}.hidden_norm", feature)
            return torch.cat(parts), feature
        u = self.linear("fc", torch.cat((embedding, feature)))
        return u, u

    def heads(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self.linear(name, x).split(self.c.head_dim))

    def through(self, layer: str, states: list[Any], positions: list[int], asked: list[int]) -> dict[int, torch.Tensor]:
        """Outputs of the columns `asked`; each sees those that stand before it in the list, and itself."""
        theta = self.c.rope_parameters["rope_theta"]
        shared = self.c.num_attention_heads // self.c.num_key_value_heads
        keys, values = [], []
        for state, position in zip(states, positions, strict=True):
            x, _ = self.enter(layer, state)
            keys.append([rope(head, position, theta) for head in self.heads(f"{layer}.self_attn.k_proj", x)])
            values.append(self.heads(f"{layer}.self_attn.v_proj", x))
        outputs = {}
        for i in asked:
            x, residual = self.enter(layer, states[i])
            attended = []
            for a, head in enumerate(self.heads(f"{layer}.self_attn.q_proj", x)):
                query, g = rope(head, positions[i], theta), a // shared
                scores = torch.stack([query @ keys[j][g] / math.sqrt(len(query)) for j in range(i + 1)])
                weights = torch.exp(scores) / torch.exp(scores).sum()
                attended.append(sum((weights[j] * values[j][g] for j in range(i + 1)), torch.zeros_like(query)))
            h = residual + self.linear(f"{layer}.self_attn.o_proj", torch.cat(attended))
            y = self.norm(f"{layer}.post_attention_layernorm", h)
            gate, up = self.linear(f"{layer}.mlp.gate_proj", y), self.linear(f"{layer}.mlp.up_proj", y)
            outputs[i] = h + self.linear(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        return outputs

    def chain(
        self, captured: torch.Tensor, ids: list[int], column: int, steps: int, detach: bool | str = False
    ) -> list[torch.Tensor]:
        """Outputs of steps 0 .. steps - 1 below root x[column + 1], fed the tokens of `ids`.

        Step k sees columns 0 .. column of the target's states and its drafted columns 1 .. k, all through the layers of
        its own stack. With `detach` all that was drafted is a constant to it; "specialists": what another stack did.
        """
        outputs: list[torch.Tensor] = []
        for step in range(steps):
            stack = self.stack_of(step)
            states, positions = self.known(captured, ids, column)
            for earlier in range(1, step + 1):
                feature = self.feedback(outputs[earlier - 1])
                if detach is True or (detach and self.stack_of(earlier - 1) != stack):
                    feature = feature.detach()
                states.append((self.seeing(feature, ids, column), ids[column + 1 + earlier]))
                positions.append(column + earlier)
            *lower, last = self.stacks[stack]
            places = list(range(len(states)))
            for layer in lower:
                found = self.through(layer, states, positions, places)
                states = [found[i] for i in places]
            outputs.append(self.through(last, states, positions, places[-1:])[places[-1]])
        return outputs

    def known(self, captured: torch.Tensor, ids: list[int], column: int) -> tuple[list[Any], list[int]]:
        """Inputs and positions of columns 0 .. column, made from the target's states."""
        return [(self.fuse(captured[t]), ids[t + 1]) for t in range(column + 1)], list(range(column + 1))

    def seeing(self, feature: torch.Tensor, ids: list[int], column: int) -> torch.Tensor:
        """A drafted feature below this column, as entry reads it."""
        return feature


class SlowVispec(SlowDrafter):
    """ViSpec: `pictures` has, for each text, the first token and the input embeddings [n, H] of its pictures."""

    pictures: dict[tuple[int, ...], list[tuple[int, torch.Tensor]]]

    def vectors(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The adaptor's vectors of a picture, query by query and head by head."""
        found = []
        for query in self.w["img_adaptor.query"]:  # [A, D]
            heads = []
            for a, one in enumerate(query):
                own = slice(a * len(one), (a + 1) * len(one))
                keys = [self.linear("img_adaptor.k_proj", row)[own] for row in rows]
                values = [self.linear("img_adaptor.v_proj", row)[own] for row in rows]
                weights = [torch.exp(one @ key / math.sqrt(len(one))) for key in keys]
                total = sum(weights, torch.zeros_like(weights[0]))
                heads.append(sum((w / total * v for w, v in zip(weights, values, strict=True)), torch.zeros_like(one)))
            found.append(self.linear("img_adaptor.o_proj", torch.cat(heads)))
        return found

    def latest(self, ids: list[int], column: int) -> torch.Tensor:
        """The global vector of the last picture that ends before token column + 1; zero if there is none."""
        found = torch.zeros_like(self.w["img_fc.weight"][:, 0])
        for first, rows in self.pictures[tuple(ids)]:
            if first + len(rows) <= column + 1:
                found = self.vectors(rows)[-1]
        return found

    def known(self, captured: torch.Tensor, ids: list[int], column: int) -> tuple[list[Any], list[int]]:
        states: list[Any] = []
        positions = []
        for t in range(column + 1):
            inside = [(a, rows) for a, rows in self.pictures[tuple(ids)] if a <= t + 1 < a + len(rows)]
            if not inside:
                states.append((self.seeing(self.fuse(captured[t]), ids, t), ids[t + 1]))
                positions.append(t)
                continue
            [(first, rows)] = inside
            tokens_with_column = [token for token in range(first, first + len(rows)) if token > 0]
            stay = tokens_with_column[max(0, len(tokens_with_column) - self.c.compressed_tokens) :]
            if t + 1 in stay:
                states.append((None, self.vectors(rows)[stay.index(t + 1)]))
                positions.append(t)
        return states, positions

    def seeing(self, feature: torch.Tensor, ids: list[int], column: int) -> torch.Tensor:
        return self.linear("img_fc", torch.cat((feature, self.latest(ids, column))))

    def enter(self, layer: str, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(state, tuple) or state[0] is not None:
            return super().enter(layer, state)
        vector = state[1]  # a compressed token
        if self.fused:
            both = self.norm(f"{layer}.input_layernorm", vector), self.norm(f"{layer}.hidden_norm", vector)
            return torch.cat(both), vector
        return vector, vector


def step_weight(weight: Any, k: int, accepted: list[float]) -> float:
    """Of step k; `accepted`: the chance that each step's token is accepted, 0 where the chain has ended by then."""
    if weight == "acceptance":
        raised = [0.1 + 0.9 * chance if chance else 0.0 for chance in accepted]
        return sum(math.prod(raised[: j + 1]) for j in range(k, len(raised)))
    return weight[k] if isinstance(weight, list) else weight**k


def slow_loss(
    drafter: SlowDrafter,
    captured: list[torch.Tensor],
    target_logits: list[torch.Tensor],
    target_features: list[torch.Tensor],
    ids: list[list[int]],
    spans: list[list[int]],
    chosen: list[int],
    settings: Any,
) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    """(loss, columns reached, columns trained, columns correct at each step), column by column.

    Args:
        captured, target_logits, target_features: of each row, [T, ...].
        chosen: target ids of the draft vocabulary, ascending.
        settings: steps, step_weight, detach and weights of the loss (`LossWeights`).
    """
    steps, weights = settings.steps, settings.weights
    loss = torch.zeros((), dtype=torch.float64)
    reached, trained, correct = [0] * steps, [0] * steps, [0] * steps
    for b, row in enumerate(ids):
        for t in range(len(row)):
            depth = sum(counted(spans[b], t, k) for k in range(steps))
            if depth == 0:
                continue
            ones: dict[int, torch.Tensor] = {}  # losses of this chain by step
            accepted = [0.0] * depth
            outputs = drafter.chain(captured[b], row, t, depth, settings.detach)
            for k, output in enumerate(outputs):
                if any(token not in chosen for token in row[t + 2 : t + 2 + k]):
                    break  # no chain gets here
                reached[k] += 1
                z, q = target_logits[b][t + 1 + k], drafter.logits(output)
                if int(z.argmax()) not in chosen:
                    continue
                trained[k] += 1
                correct[k] += int(chosen[int(q.argmax())] == int(z.argmax()))
                p = torch.softmax(z[chosen], -1)
                one = weights.token * objective(weights.objective, q, p.tolist())
                if weights.rank:
                    one = one + weights.rank * rank_likelihood(q, p.tolist(), weights.rank_tokens)
                one = one + weights.top_k * top_k_cross_entropy(q, p, weights.top_k_tokens)
                one = one + weights.feature * smooth_l1(output, target_features[b][t + 1 + k])
                ones[k], accepted[k] = one, float(torch.minimum(p, torch.softmax(q.detach(), -1)).sum())
            for k, one in ones.items():
                loss = loss + step_weight(settings.step_weight, k, accepted) * one
    return loss, reached, trained, correct
