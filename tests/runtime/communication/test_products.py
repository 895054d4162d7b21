"""Matrix products of several ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.runtime.communication.operation_facts import ENDPOINTS, EndpointKind
from asyncpipe.runtime.communication.products import PRODUCTS, Factors, product_bytes
from asyncpipe.tests.support.processes.rings import run_threads

SIZE = st.integers(1, 9)


@pytest.mark.parametrize("name", PRODUCTS)
@settings(max_examples=25)
@given(st.integers(1, 5), SIZE, SIZE, SIZE, st.sampled_from(ENDPOINTS))
def test_the_product_is_that_of_one_process_and_its_bytes_are_those_of_the_formula(
    name: str, ranks: int, m: int, k: int, n: int, endpoint: EndpointKind
) -> None:
    a, b = torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)
    owner, other = Factors(m, k, n, a.dtype, a, b), Factors(m, k, n, a.dtype)
    products = run_threads(
        ranks,
        lambda links: PRODUCTS[name](links, other if links.rank else owner, endpoint=endpoint),
    )
    having = [product.result for product in products if product.result is not None]
    assert len(having) == (1 if name == "matmul_row" else ranks)
    for result in having:
        torch.testing.assert_close(result, a @ b)
    for matrix, sent_bytes in product_bytes(name, owner, ranks).items():
        assert sum(product.sent[matrix] for product in products) == sent_bytes


def test_the_two_products_send_as_much_as_their_formulas_say() -> None:
    m, k, n, ranks = 12, 8, 20, 4
    factors = Factors(m, k, n, torch.uint8)
    row, reduction = (product_bytes(name, factors, ranks) for name in PRODUCTS)
    assert sum(row.values()) == k * n * 3 + m * k * 3 // 4 + m * n * 3 // 4
    assert sum(reduction.values()) == m * k * 3 // 4 + k * n * 3 // 4 + 4 * (2 * m * n * 3 // 4)
