from projects.digits import DigitsCNN
from trainkit.config import LazyCall as L

model = L(DigitsCNN)(width=16)
