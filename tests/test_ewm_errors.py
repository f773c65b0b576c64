"""What the window of dataframes refuses, and in what words."""

import numpy as np
import pandas as pd
import pytest

import emaopt

X = np.ones(3, np.float32)
DAYS = np.array(["2024-01-01", "2024-01-02", "2024-01-05"], "datetime64[D]")
DAY = np.timedelta64(1, "D")


@pytest.mark.parametrize(
    ("error", "message", "args", "options"),
    [
        (ValueError, r"give a decay .* or times with halflife; got neither", (X,), {}),
        (
            ValueError,
            r"halflife=3 goes with times; .* decay=decay_from",
            (X,),
            {"halflife": 3},
        ),
        (ValueError, r"not both; got decay=0.5 and times", (X, 0.5), {"times": X}),
        (ValueError, r"not both; got decay=0.5 and half", (X, 0.5), {"halflife": 2}),
        (ValueError, r"times need a halflife, got half", (X,), {"times": X}),
        (ValueError, r"decay must be in \[0, 1\), got 1.0", (X, 1.0), {}),
        (ValueError, r"decay must be in \[0, 1\), got nan", (X, np.nan), {}),
        (ValueError, r"decay must be one number in \[0, 1\), got \[", (X, [0.5]), {}),
        (ValueError, r"decay must be one number .* <function", (X, lambda t: 0.5), {}),
        (TypeError, r"decay must be a real number.* got '0.5'", (X, "0.5"), {}),
        (AssertionError, r"values: found shape \(\), expected a lea", (X[0], 0.5), {}),
        (AssertionError, r"values: found str 'x', expected an array", ("x", 0.5), {}),
        (ValueError, r"axis must .* in \[-1, 1\), got 1", (X, 0.5), {"axis": 1}),
        (TypeError, r"axis must be a whole number.* 0.5", (X, 0.5), {"axis": 0.5}),
        (TypeError, r"adjust must be True or False, got 1", (X, 0.5), {"adjust": 1}),
        (
            TypeError,
            r"ignore_na must be True or F.* None",
            (X, 0.5),
            {"ignore_na": None},
        ),
        (
            ValueError,
            r"min_periods must .* >= 0, got -1",
            (X, 0.5),
            {"min_periods": -1},
        ),
        (
            ValueError,
            r"times must have one .* found shape \(2,\), expected \(3,\)",
            (X,),
            {"times": [0, 1], "halflife": 1},
        ),
        (
            ValueError,
            r"times must not decrease, got 1.0 at step 2, after 2.0",
            (X,),
            {"times": [0.0, 2.0, 1.0], "halflife": 1},
        ),
        (
            ValueError,
            r"times must not decrease, got 2024-01-02 at step 1, after 2024-01-05",
            (X,),
            {"times": DAYS[::-1], "halflife": DAY},
        ),
        (
            ValueError,
            r"times must be finite, got nan at step 1",
            (X,),
            {"times": [0.0, np.nan, 1.0], "halflife": 1},
        ),
        (
            ValueError,
            r"times must be finite, got NaT at step 2",
            (X,),
            {"times": np.array([*DAYS[:2], "NaT"], DAYS.dtype), "halflife": DAY},
        ),
        (
            TypeError,
            r"times must be real numbers or numpy.datetime64, got dtype <U1",
            (X,),
            {"times": ["a", "b", "c"], "halflife": 1},
        ),
        (
            TypeError,
            r"halflife must be a timedelta, since times are dates, got 3",
            (X,),
            {"times": DAYS, "halflife": 3},
        ),
        (
            TypeError,
            r"halflife must be a number, got .*timedelta64\(1,'D'\)",
            (X,),
            {"times": X, "halflife": DAY},
        ),
        (
            ValueError,
            r"halflife must be positive, got .*timedelta64\(0,'D'\)",
            (X,),
            {"times": DAYS, "halflife": 0 * DAY},
        ),
        (
            ValueError,
            r"halflife must be positive, got .*timedelta64\('NaT'",
            (X,),
            {"times": DAYS, "halflife": np.timedelta64("NaT", "D")},
        ),
        (
            ValueError,
            r"halflife=.*\(1,'M'\) has no fixed length .* datetime64\[D\]",
            (X,),
            {"times": DAYS, "halflife": np.timedelta64(1, "M")},
        ),
        (
            ValueError,
            r"halflife must be in \(0, inf\), got 0",
            (X,),
            {"times": X, "halflife": 0},
        ),
    ],
)
def test_errors_name_the_argument_and_its_value(error, message, args, options):
    with pytest.raises(error, match=message):
        emaopt.ewm_mean(*args, **options)


def test_errors_of_pairs():
    with pytest.raises(AssertionError, match=r"y: found shape \(2,\), expected \(3,\)"):
        emaopt.ewm_cov(X, X[:2], 0.5)
    with pytest.raises(TypeError, match="y must be real, got dtype complex64"):
        emaopt.ewm_corr(X, X.astype(np.complex64), 0.5)
    with pytest.raises(TypeError, match="bias must be True or False, got 'no'"):
        emaopt.ewm_var(X, 0.5, bias="no")


def test_a_table_is_no_array():
    table = pd.DataFrame({"a": [1.0, 2.0]})
    message = r"values: found DataFrame, expected an array of numbers: pass its .to_nu"
    with pytest.raises(AssertionError, match=message):
        emaopt.ewm_mean(table, 0.5)
    np.testing.assert_array_equal(emaopt.ewm_mean(table["a"], 0.0), [1, 2])
