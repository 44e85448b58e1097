"""Compare two policies on a conversation."""

from beluga.router import model_costs
from beluga.simulate import Options, TraceEntry, make_trace, simulate

turns = [
    TraceEntry(arrival_s=0.4 * turn, input_tokens=512 * (turn + 1), output_tokens=64,
           blocks=list(range(turn + 1)))
    for turn in range(20)
]  # fmt: skip
trace = make_trace("a conversation", 512, turns, rate=1.0)
options = Options(workers=2, pool=64 << 30, model=model_costs("llama-3.1-8b-h200"))  # bytes
rows = simulate(trace, options, policies=["least-cost", "round-robin"], memories=["pool"])
print(len(rows))  # 4: for each policy, a row for the seed and the mean
print(rows[0].policy, rows[0].hit_rate > 0.5)  # least-cost True
