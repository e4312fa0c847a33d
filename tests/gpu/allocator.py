"""A plugin of pytest for compute-sanitizer: each array of CuPy has an allocation of its own, whose bounds it sees."""


def pytest_configure() -> None:
    import cupy

    cupy.cuda.set_allocator(None)
