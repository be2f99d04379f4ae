"""A Python model for tests of serving: twice its input, which fails, dies or is busy when it is told to."""

MODEL = """
import os, time
import numpy as np

class Model:
    inputs = {"x": "FP32[-1, 2]"}
    outputs = {"y": "FP32[-1, 2]"}
    max_batch_size = 64

    def predict(self, x):
        first = float(x[0, 0])
        while first == 13 and os.path.exists(__file__ + ".held"):
            open(__file__ + ".busy", "w").close()
            time.sleep(0.005)
        if first == 66:
            raise ValueError("broken inside")
        if first == 99 and not os.path.exists(__file__ + ".died"):
            open(__file__ + ".died", "w").close()
            os._exit(9)
        return {"y": 2 * x}
"""
