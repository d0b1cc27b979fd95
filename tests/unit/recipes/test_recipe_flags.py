"""The flags of the MNIST recipes."""

import common
import pytest


def flags(*arguments):
    return common.parse_flags("A recipe.", arguments)


def test_defaults_suit_every_recipe():
    chosen = flags()
    assert (chosen.batch_size, chosen.epochs, chosen.lr, chosen.momentum) == (32, 8, 0.02, 0.9)
    assert chosen.dataset == "auto"
    assert not chosen.dry_run


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch-size", "0"], "--batch-size: must be a positive whole number, got '0'"),
        (["--batch-size", "1.5"], "--batch-size: must be a positive whole number, got '1.5'"),
        (["--test-batch-size", "-1"], "--test-batch-size: must be a positive whole number"),
        (["--epochs", "none"], "--epochs: must be a positive whole number, got 'none'"),
        (["--log-interval", "0"], "--log-interval: must be a positive whole number"),
        (["--lr", "0"], "--lr: must be a positive number, got '0'"),
        (["--lr", "inf"], "--lr: must be a positive number, got 'inf'"),
        (["--lr", "nan"], "--lr: must be a positive number, got 'nan'"),
        (["--momentum", "1"], "--momentum: must be a number from 0 to below 1, got '1'"),
        (["--seed", "-3"], "--seed: must be a whole number from 0 to 2147483647, got '-3'"),
        (["--dataset", "cifar"], "--dataset: invalid choice: 'cifar'"),
        (["--dataset", "digits", "--data-dir", "x"], "does not read --data-dir x"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--learning-rate", "3"], "unrecognized arguments: --learning-rate 3"),
    ],
)
def test_a_wrong_flag_is_an_error_that_names_the_value_and_what_is_accepted(
    arguments, complaint, capsys
):
    with pytest.raises(SystemExit) as end:
        flags(*arguments)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_dry_run_is_one_epoch():
    assert flags("--dry-run", "--epochs", "5").epochs == 1
