set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1
python3 - <<'P'
import torch
from torch.nn import functional as F
w = torch.randn(6, 64, 96, device="cuda").bfloat16()[::2]
x = torch.randn(300, 64, device="cuda").bfloat16()
e = torch.tensor([100, 100, 300], dtype=torch.int32, device="cuda")
y = F.grouped_mm(x, w, offs=e)
want = torch.cat([x[:100] @ w[0], x[100:] @ w[2]])
z = F.grouped_mm(torch.randn(300, 96, device="cuda").bfloat16(), w.transpose(1, 2), offs=e)
print("strided grouped_mm", (y - want).abs().max().item(), want.abs().max().item())
P
timeout 330 python3 -m bench.gpu right --out $OUT/right.md > $OUT/right.log 2>&1; echo right $?
timeout 300 python3 -m bench.gpu fast --parts experts,profile,calibrate,replay --out $OUT/fast.md > $OUT/fast.log 2>&1; echo fast $?
cp /tmp/foremoe-bench-gpu*.json /tmp/foremoe-bench-gpu*.toml $OUT/ 2>/dev/null
grep -E "FAILED|passed|failed|^\(" $OUT/right.log | head -40
