"""Slow, obvious twins of the mathematics: loops over tokens, no shared code with the product beyond the parameters.

Those of whole drafters are in tests/slow_drafters.py.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch


def counted(span: list[int], column: int, step: int) -> bool:
    """The definition itself: x[t+1], ..., x[t+2+k] all lie in one supervised span."""
    positions = range(column + 1, column + 3 + step)
    return all(0 <= p < len(span) and span[p] > 0 and span[p] == span[column + 1] for p in positions)


def laid_out(documents: list[tuple[list[int], list[int]]], width: int) -> list[list[int]]:
    """One row of a batch, token by token: [ids, spans, positions], padded with 0.

    Args:
        documents: (ids, number of the span of each token, 0 outside) of each. A document's first token is no span's.
    """
    ids, spans, positions = [], [], []
    for tokens, span in documents:
        for position, token in enumerate(tokens):
            ids.append(token)
            spans.append(span[position] if position > 0 else 0)
            positions.append(position)
    return [row + [0] * (width - len(row)) for row in (ids, spans, positions)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotates one head vector pair by pair: (x_i, x_{i + D/2}) by position * theta^(-2i/D)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def draft_tree_ancestors(parents: list[int]) -> list[set[int]]:
    """Ancestors of each node, itself included: its parent's and itself."""
    result: list[set[int]] = []
    for node, parent in enumerate(parents):
        result.append({node} | (result[parent] if parent >= 0 else set()))
    return result


def greedy_path(tokens: list[int], parents: list[int], best: list[int]) -> tuple[list[int], int]:
    """Walks down from the root: at each node the first child that is the target's choice. (path, bonus)."""
    path = [0]
    while True:
        wanted = best[path[-1]]
        child = next((i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == wanted), None)
        if child is None:
            return path, wanted
        path.append(child)


def processed(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Temperature, then the k likeliest, then the fewest likeliest whose mass reaches top_p; token by token."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(len(logits))]
    exponentials = [math.exp((z - max(logits)) / temperature) for z in logits]
    order = sorted(range(len(logits)), key=lambda i: -exponentials[i])
    kept = order[:top_k] if top_k else order
    total = sum(exponentials[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= top_p:
            break
        nucleus.append(i)
        mass += exponentials[i] / total
    total = sum(exponentials[i] for i in nucleus)
    return [exponentials[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


def sampled_walk(
    tokens: list[int], parents: list[int], p: list[list[float]], drawn_from: list[list[float]] | None
) -> dict[tuple[tuple[int, ...], int], float]:
    """The law of (path, bonus), walked from the root child by child, the residual written out after each rejection.

    `p`: the target's distribution after each node. `drawn_from`: what each node's children were drawn from, one after
    the other without replacement; None where a node's proposal is certain (q is 1 on its token).
    """
    law: dict[tuple[tuple[int, ...], int], float] = {}

    def walk(path: tuple[int, ...], weight: float) -> None:
        node, left = path[-1], list(p[path[-1]])
        in_urn = list(drawn_from[node]) if drawn_from else []
        for child in [i for i, parent in enumerate(parents) if parent == node]:
            x = tokens[child]
            q = [share / sum(in_urn) for share in in_urn] if in_urn else [float(v == x) for v in range(len(left))]
            if in_urn:
                in_urn[x] = 0.0
            accept = min(1.0, left[x] / q[x])
            if accept > 0:
                walk((*path, child), weight * accept)
            weight *= 1 - accept
            if weight <= 1e-15:
                return
            rest = [max(a - b, 0.0) for a, b in zip(left, q, strict=True)]
            left = [value / sum(rest) for value in rest]
        for token, share in enumerate(left):
            if share > 0:
                law[path, token] = law.get((path, token), 0.0) + weight * share

    walk((0,), 1.0)
    return law


def borrowed(p: list[float], near: list[int], budget: float) -> list[int]:
    """LANTERN's A: the longest beginning of the neighbours with a mass within the budget."""
    taken: list[int] = []
    for token in near:
        if sum(p[other] for other in [*taken, token]) > budget:
            break
        taken.append(token)
    return taken


def lantern_walk(
    tokens: list[int], parents: list[int], p: list[list[float]], near: list[list[int]], budget: tuple[str, float]
) -> tuple[dict[tuple[tuple[int, ...], int], float], dict[int, float]]:
    """(the law of (path, bonus) on a ranked tree, total variation at each node with children).

    Args:
        near: neighbours of each token.
        budget: ("delta", delta) or ("lambda", lambda).
    """
    law: dict[tuple[tuple[int, ...], int], float] = {}
    variation: dict[int, float] = {}

    def walk(path: tuple[int, ...], weight: float) -> None:
        node, left, spent = path[-1], list(p[path[-1]]), 0.0
        drawn = [0.0] * len(left)
        for child in [i for i, parent in enumerate(parents) if parent == node]:
            x = tokens[child]
            if drawn[x]:
                continue
            mine = borrowed(left, near[x], budget[1] - spent if budget[0] == "delta" else (budget[1] - 1) * left[x])
            accept = (left[x] + sum(left[y] for y in mine)) / sum(left) if sum(left) > 1e-12 else 0.0
            drawn[x] = left[x] + sum(left[y] for y in mine)
            spent += sum(left[y] for y in mine)
            if accept > 0 and weight > 0:
                walk((*path, child), weight * accept)
            weight *= 1 - accept
            for y in [x, *mine]:
                left[y] = 0.0
        mass = sum(left)
        for token, share in enumerate(left):
            if share > 0 and weight > 1e-15:
                law[path, token] = law.get((path, token), 0.0) + weight * share / mass
        result = [a + b for a, b in zip(drawn, left, strict=True)]
        variation[node] = sum(abs(a - b) for a, b in zip(result, p[node], strict=True)) / 2

    walk((0,), 1.0)
    return law, variation


def lantern_drawn(
    p: list[float], q: list[float], near: list[list[int]], budget: tuple[str, float], children: list[int]
) -> tuple[list[float], list[float], float]:
    """(chance of each child once those before it are rejected, law behind all rejections, what was moved) at a node
    whose children were drawn from q without replacement."""
    chances, left, spent, moved = [], list(p), 0.0, 0.0  # `left` is a law
    reached = mine = 1.0  # chance that all so far are rejected: whatever was drawn, and of these children
    for x in children:
        kept = []
        for token, own in enumerate(left):
            allowed = (budget[1] - spent) / reached if budget[0] == "delta" else (budget[1] - 1) * own
            kept.append(min(q[token], own + sum(left[y] for y in borrowed(left, near[token], allowed))))
        excess = sum(max(a - b, 0.0) for a, b in zip(kept, left, strict=True))
        if budget[0] == "delta" and excess * reached > budget[1] - spent:
            scale = (budget[1] - spent) / (excess * reached)
            kept = [b + (a - b) * scale if a > b else a for a, b in zip(kept, left, strict=True)]
            excess *= scale
        spent += excess * reached
        moved += excess * mine
        reached *= 1 - sum(kept)
        rest = [max(b - a, 0.0) for a, b in zip(kept, left, strict=True)]
        left = [value / sum(rest) for value in rest] if sum(rest) > 1e-12 else p
        chances.append(kept[x] / q[x])
        mine *= 1 - kept[x] / q[x]
        others = [share if token != x else 0.0 for token, share in enumerate(q)]
        q = [share / sum(others) for share in others] if sum(others) > 0 else q
    return chances, left, moved


def most_frequent(tokens: list[int], counts: list[int], size: int, must_have: list[int]) -> list[int]:
    """The `size` most frequent of `tokens`, ascending: those of `must_have` first, then by count, then by id."""
    fixed = [token for token in tokens if token in must_have]
    others = sorted((token for token in tokens if token not in must_have), key=lambda token: (-counts[token], token))
    return sorted(fixed + others[: size - len(fixed)])


# How draft trees grow. A table gives the log-probabilities of the tokens after each path of drafted tokens; a tree is
# the paths of its nodes below the root.

Path = tuple[int, ...]
Table = Callable[[Path], list[float]]


def entropy_in_nats(log_probs: list[float], over: int) -> float:
    """-sum p log p over the `over` likeliest tokens."""
    likeliest = sorted(log_probs, reverse=True)[:over]
    return -sum(math.exp(value) * value for value in likeliest if value > -math.inf)


def by_likelihood(log_probs: list[float]) -> list[int]:
    return sorted(range(len(log_probs)), key=lambda token: -log_probs[token])


def path_value(table: Table, path: Path) -> float:
    """Sum of log-probabilities along a path."""
    return sum(table(path[:i])[token] for i, token in enumerate(path))


def likeliest_chain(table: Table, tokens: int, c: float = 0.0, h: float = 1.0) -> tuple[list[Path], int]:
    """(paths, draft calls): the likeliest token after the likeliest token, until one was uncertain (SVIP)."""
    paths: list[Path] = []
    here: Path = ()
    while len(paths) < tokens:
        log_probs = table(here)
        here = (*here, by_likelihood(log_probs)[0])
        paths.append(here)
        if c * entropy_in_nats(log_probs, len(log_probs)) > h**2:
            break
    return paths, len(paths)


def ranked_tree(table: Table, ranks: list[Path]) -> tuple[list[Path], int]:
    """(paths, draft calls) of a static tree: each path of ranks, walked from the root."""
    paths = []
    for path in ranks:
        here: Path = ()
        for rank in path:
            order = by_likelihood(table(here))
            if rank >= len(order):
                break
            here = (*here, order[rank])
        else:
            paths.append(here)
    return paths, max(map(len, paths))


def eagle2_tree(
    table: Table, nodes: int, calls: int, top_k: int, ends: Callable[[int, list[Path], list[Path]], bool] | None = None
) -> tuple[list[Path], int]:
    """(paths, draft calls). `ends` is asked after each call but the last: (calls so far, what was expanded, next beam).

    All nodes that were ever proposed, sorted by their probability; the first nodes - 1 are kept.
    """
    expanded: list[Path] = [()]
    proposed: list[Path] = []
    call = 0
    while True:
        call += 1
        children = [(*path, token) for path in expanded for token in by_likelihood(table(path))[:top_k]]
        proposed += children
        beam = sorted(children, key=lambda path: -path_value(table, path))[:top_k]
        if call == calls or (ends is not None and ends(call, expanded, beam)):
            break
        expanded = beam
    proposed.sort(key=lambda path: (-path_value(table, path), len(path)))
    return proposed[: nodes - 1], call


def ddd_ends(table: Table, threshold: float, at: Sequence[int] | None) -> Callable[[int, list[Path], list[Path]], bool]:
    """The beam's total probability is below e^threshold; tested after the calls `at`, or after all."""

    def ends(call: int, expanded: list[Path], beam: list[Path]) -> bool:
        total = sum(math.exp(path_value(table, path)) for path in beam)
        return (at is None or call in at) and total < math.exp(threshold)

    return ends


def svip_tree_ends(table: Table, c: float, h: float) -> Callable[[int, list[Path], list[Path]], bool]:
    """The expected bound on acceptance, 1 - sqrt(c H) of a node weighted by its probability, is below 1 - h."""

    def ends(call: int, expanded: list[Path], beam: list[Path]) -> bool:
        weights = [math.exp(path_value(table, path)) for path in expanded]
        bounds = [1 - math.sqrt(c * entropy_in_nats(table(path), len(table(path)))) for path in expanded]
        return sum(w * bound for w, bound in zip(weights, bounds, strict=True)) / sum(weights) < 1 - h

    return ends


def c2t_tree(
    table: Table,
    confidence: Callable[[float, float, int], float],
    beta: float,
    beam: int | None,
    top_k: int,
    calls: int,
    nodes: int | None,
) -> tuple[list[Path], int]:
    """(paths, draft calls). `confidence` is asked with joint probability, the parent's entropy and the depth from 0."""
    frontier: list[Path] = [()]
    kept: list[Path] = []
    depth = 0
    while frontier and depth < calls:
        candidates = []
        for parent in frontier:
            spread = entropy_in_nats(table(parent), 1000)
            for token in by_likelihood(table(parent))[:top_k]:
                path = (*parent, token)
                candidates.append((path, confidence(math.exp(path_value(table, path)), spread, depth)))
        passed = sorted((each for each in candidates if each[1] >= beta), key=lambda each: -each[1])
        frontier = [path for path, _ in passed][:beam]
        if nodes is not None:
            frontier = sorted(frontier, key=lambda path: -path_value(table, path))[: nodes - 1]
        kept += frontier
        depth += 1
    kept.sort(key=lambda path: (-path_value(table, path), len(path)))
    return kept if nodes is None else kept[: nodes - 1], depth


def replayed(
    tree_below: Callable[[int], tuple[list[int], list[int]]], prompt_length: int, text: list[int]
) -> tuple[list[int], bool]:
    """(drafted tokens accepted in each round, did the end cut the last one): a walk along a recorded answer.

    `tree_below(n)`: tokens and parents of the tree that is drafted after the first n tokens of `text`, the last of
    which is its root. The answer begins behind the prompt; its first token comes without a round.
    """
    read, accepted = prompt_length + 1, []
    cut_off = False
    while read < len(text):
        tokens, parents = tree_below(read)
        node, count = 0, 0
        while read + count < len(text):
            children = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == text[read + count]]
            if not children:
                break
            node, count = children[0], count + 1
        accepted.append(count)
        cut_off = read + count == len(text)  # no bonus is left
        read += count + 1
    return accepted, cut_off


# Rankings.


def blended_counts(corpora: list[list[int]], weights: list[float], scale: int) -> list[int]:
    """Relative frequencies, added up by weight, as multiples of 1 / scale: rounded to the nearest, seen tokens to 1."""
    result = []
    for token in range(len(corpora[0])):
        frequency = Fraction(0)
        for counts, weight in zip(corpora, weights, strict=True):
            frequency += Fraction(weight) * Fraction(counts[token], sum(counts)) / sum(map(Fraction, weights))
        result.append(max(math.floor(frequency * scale + Fraction(1, 2)), int(frequency > 0)))
    return result


# C2T's rows: every node that a beam search ever proposed, and whether the target says it.


def c2t_rows(
    table: Table, top_k: int, calls: int, entropy_over: int, said: Path
) -> tuple[list[tuple[int, float, float, bool]], int, int]:
    """(rows, accepted tokens, nodes below the end of what is known) of an uncut tree. A row is (depth from 0, joint
    probability, entropy of the parent's distribution, accepted).

    Args:
        said: the draft tokens that the target goes on with; -1 for those that no drafter has.
    """
    paths, _ = eagle2_tree(table, 10**9, calls, top_k)
    length = 0
    while length < len(said) and said[: length + 1] in paths:
        length += 1
    rows, beyond = [], 0
    for path in paths:
        if len(path) > len(said) and path[: len(said)] == said:
            beyond += 1
            continue
        spread = entropy_in_nats(table(path[:-1]), entropy_over)
        rows.append((len(path) - 1, math.exp(path_value(table, path)), spread, path == said[: len(path)]))
    return rows, length, beyond


def c2t_confidence(weights: dict[str, torch.Tensor]) -> Callable[[float, float, int], float]:
    """The classifier written out: each hidden unit, cut off at zero, then their weighted sum."""
    hidden, bias = weights["hidden.weight"].tolist(), weights["hidden.bias"].tolist()
    output, last = weights["output.weight"].tolist()[0], weights["output.bias"].item()

    def confidence(p: float, h: float, d: int) -> float:
        units = [max(0.0, w[0] * p + w[1] * h + w[2] * d + b) for w, b in zip(hidden, bias, strict=True)]
        return 1 / (1 + math.exp(-last - sum(w * unit for w, unit in zip(output, units, strict=True))))

    return confidence


# Losses of one column, token by token from lists of probabilities; logits are a tensor, whose gradient is asked for.


def objective(name: str, logits: torch.Tensor, p: list[float]) -> torch.Tensor:
    """How far q = softmax(logits) is from p."""
    q, zero = torch.softmax(logits, -1), torch.zeros((), dtype=logits.dtype)
    tokens = range(len(p))
    acceptance = sum((torch.minimum(q[v], torch.as_tensor(p[v], dtype=logits.dtype)) for v in tokens), zero)
    forward = sum((p[v] * (math.log(p[v]) - torch.log(q[v])) for v in tokens if p[v] > 0), zero)
    if name == "soft_ce":
        return sum((-p[v] * torch.log(q[v]) for v in tokens), zero)
    if name == "hard_ce":
        return -torch.log(q[max(tokens, key=lambda v: p[v])])
    if name == "reverse_kl":
        return sum((q[v] * (torch.log(q[v]) - math.log(p[v])) for v in tokens), zero)
    if name == "hybrid":
        share = math.exp(-3 * float(acceptance.detach()))
        return share * forward + (1 - share) * (1 - acceptance)
    return {"forward_kl": forward, "total_variation": 1 - acceptance, "log_acceptance": -torch.log(acceptance)}[name]


def rank_likelihood(logits: torch.Tensor, p: list[float], k: int) -> torch.Tensor:
    """-log of the chance to draw the k likeliest tokens of p in this order from softmax(logits), each from those left
    among them."""
    order = sorted(range(len(p)), key=lambda v: -p[v])[:k]
    total = torch.zeros((), dtype=logits.dtype)
    for i, token in enumerate(order):
        left = sum((torch.exp(logits[v]) for v in order[i:]), torch.zeros((), dtype=logits.dtype))
        total = total - torch.log(torch.exp(logits[token]) / left)
    return total


def quantised(weights: list[float], bits: int) -> list[float]:
    """`models.quantize` of the weights that share a scale, one after another. 8 bits: of a row; 4 bits: of a group."""

    def rounded(value: float) -> float:
        return float(torch.tensor(value).bfloat16())

    if bits == 8:
        scale = rounded(max(max(abs(w) for w in weights) / 127, 2.0**-126))
        return [float(torch.tensor(max(-127, min(127, round(w / scale))) * scale)) for w in weights]
    scale = rounded(max((max(weights) - min(weights)) / 15, 2.0**-126))
    zero = rounded(min(weights) + 8 * scale)
    codes = [max(0, min(15, round((w - zero) / scale) + 8)) for w in weights]
    return [float(torch.tensor((code - 8) * scale + zero)) for code in codes]
