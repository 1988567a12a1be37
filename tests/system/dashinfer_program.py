"""A program of DashInfer 1.x, as its users write them; knows nothing of the fleet.

python dashinfer_program.py MODEL NEW_TOKENS FATE ID...    (FATE: finish, or wait to be killed)
"""

import json
import sys
import threading

import torch
import torch.utils.dlpack
from dashinfer import allspark  # type: ignore[import-not-found]

model, new, fate, *ids = sys.argv[1:]
prompt = [int(i) for i in ids]
Status = allspark.GenerateRequestStatus
engine = allspark.ClientEngine()  # starts $AS_DAEMON_PATH/mpirun, then sleeps eight seconds
config = allspark.AsModelConfig(
    model_name=model, model_path=f"/models/{model}.dimodel", weights_path=f"/models/{model}.ditensors",
    compute_unit="CPU:0", engine_max_length=512, engine_max_batch=8, num_threads=2,
)  # fmt: skip
engine.build_model_from_config_struct(config)
engine.start_model(model)


def start(length: int):  # type: ignore[no-untyped-def]
    inputs = {"input_ids": torch.utils.dlpack.to_dlpack(torch.tensor([prompt], dtype=torch.int64))}
    options = {"top_k": 1, "temperature": 1.0, "early_stopping": False, "max_length": length, "seed": 1}
    status, handle, queue = engine.start_request(model, inputs, options)
    assert status == allspark.AsStatus.ALLSPARK_SUCCESS, status
    return handle, queue


def generate(results: list[list[int]]) -> None:
    handle, queue = start(len(prompt) + int(new))
    tokens: list[int] = []
    while (status := queue.GenerateStatus()) in (Status.Init, Status.ContextFinished, Status.Generating):
        element = queue.Get()
        if element is not None:
            tokens += element.ids_from_generate
    assert status == Status.GenerateFinished, status
    while (element := queue.GetNoWait()) is not None:
        tokens += element.ids_from_generate
    assert queue.GeneratedLength() == len(tokens)
    engine.release_request(model, handle)
    results.append(tokens)


if fate == "wait":
    held = [start(512) for _ in range(3)]
    print("holding", len(held), flush=True)
    threading.Event().wait()
results: list[list[int]] = []
threads = [threading.Thread(target=generate, args=(results,)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
engine.stop_model(model)
engine.release_model(model)
print(json.dumps(results), flush=True)
