"""What mypy must not let pass: each line that ends in `wrong`. Checked by mypy, not run."""

import shmring
from manager import GenerateRequest, SchedulerPort, Settings


def mistakes(ring: shmring.Ring, producer: shmring.Producer, consumer: shmring.Consumer) -> None:
    producer.push("text")  # wrong
    producer.try_push(7)  # wrong
    producer.pop()  # wrong
    consumer.push(b"")  # wrong
    consumer.pop().hex()  # wrong
    ring.producer(policy=0)  # wrong
    shmring.create("name", capacity_bytes="4096")  # wrong
    shmring.wait_any([producer])  # wrong
    Settings(workers=1)  # wrong
    Settings(name="name", worker=1)  # wrong
    GenerateRequest("text")  # wrong
    SchedulerPort.attach(name="name", timeout="1")  # wrong
