"""The flags of the recipes, and the learning rate that follows from them."""

import common
import pytest

import hvkit


def flags(*arguments):
    return common.parse_flags("A recipe.", arguments)


def test_defaults_suit_every_recipe():
    chosen = flags()
    assert (chosen.batch_size, chosen.epochs, chosen.lr, chosen.momentum) == (32, 8, 0.02, 0.9)
    assert chosen.dataset == "auto"
    assert not chosen.dry_run


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("Synchronous", hvkit.Synchronous()),
        ("localsgd:every=4", hvkit.LocalSGD(4)),
        ("DiLoCo:every=50,outer_lr=0.5", hvkit.DiLoCo(50, outer_lr=0.5)),
    ],
)
def test_a_strategy_is_a_name_with_settings(text, strategy):
    assert flags().strategy == hvkit.Synchronous()
    assert flags("--strategy", text).strategy == strategy


def test_a_compression_is_a_word_or_a_name_with_settings():
    assert flags().compression == "none"
    assert flags("--compression", "int8").compression == "int8"
    assert flags("--compression", "TopK:ratio=0.01").compression == hvkit.TopK(0.01)
    assert flags("--compression", "powersgd").compression == hvkit.PowerSGD()


def in_meshes(*arguments):
    return common.parse_flags("A recipe.", arguments, meshes=True)


def test_a_mesh_is_the_lengths_of_its_axes():
    assert in_meshes().mesh is None
    assert in_meshes("--mesh", "pipeline=2,data=3").mesh == hvkit.Mesh(pipeline=2, data=3)
    assert in_meshes("--mesh", "data=1, tensor=-1").mesh == hvkit.Mesh(data=1, tensor=-1)


def gpt_flags(*arguments):
    return common.parse_gpt_flags("A recipe.", arguments)


@pytest.mark.parametrize("parse", [in_meshes, gpt_flags])
def test_microbatches_need_a_pipeline(parse, capsys):
    assert parse("--mesh", "pipeline=2", "--microbatches", "4").microbatches == 4
    with pytest.raises(SystemExit):
        parse("--microbatches", "4")
    assert "--microbatches 4 needs a pipeline: add --mesh pipeline=2" in capsys.readouterr().err


def test_a_dry_run_is_one_epoch():
    assert flags("--dry-run", "--epochs", "5").epochs == 1


RESNET50 = "--synthetic --model resnet50"


def cnn_flags(*arguments):
    return common.parse_cnn_flags("A recipe.", arguments)


def test_defaults_train_resnet20_with_augmentation():
    chosen = cnn_flags()
    assert (chosen.model, chosen.synthetic, chosen.augment) == ("resnet20", False, True)
    assert (chosen.precision, chosen.compression, chosen.schedule) == ("float32", "none", "cosine")


def test_defaults_of_the_throughput_are_imagenets_images():
    chosen = cnn_flags(*RESNET50.split())
    assert (chosen.image_size, chosen.classes) == (224, 1000)


@pytest.mark.parametrize(
    ("parse", "line", "complaint"),
    [
        (flags, "--batch-size 0", "--batch-size: must be a positive whole number, got '0'"),
        (flags, "--batch-size 1.5", "--batch-size: must be a positive whole number, got '1.5'"),
        (flags, "--test-batch-size -1", "--test-batch-size: must be a positive whole number"),
        (flags, "--epochs none", "--epochs: must be a positive whole number, got 'none'"),
        (flags, "--log-interval 0", "--log-interval: must be a positive whole number"),
        (flags, "--lr 0", "--lr: must be a positive number, got '0'"),
        (flags, "--lr inf", "--lr: must be a positive number, got 'inf'"),
        (flags, "--lr nan", "--lr: must be a positive number, got 'nan'"),
        (flags, "--momentum 1", "--momentum: must be a number from 0 to below 1, got '1'"),
        (flags, "--seed -3", "--seed: must be a whole number from 0 to 2147483647, got '-3'"),
        (flags, "--dataset cifar", "--dataset: invalid choice: 'cifar'"),
        (flags, "--dataset digits --data-dir x", "does not read --data-dir x"),
        (flags, "--strategy ring", "--strategy: must be one of Centralized, "),
        (flags, "--strategy diloco", "--strategy: diloco: "),
        (flags, "--strategy DiLoCo:every=0", "every must be at least 1, got 0"),
        (flags, "--strategy DiLoCo:every=five", "every must be an int, got 'five'"),
        (flags, "--strategy DiLoCo:every=5,lr=1", "unexpected keyword argument 'lr'"),
        (flags, "--strategy DiLoCo:5", "settings are key=value, got '5'"),
        (flags, "--compression fp8", "must be one of none, fp16, bf16, int8, PowerSGD, TopK"),
        (flags, "--epoch 3", "unrecognized arguments: --epoch 3"),
        (flags, "--learning-rate 3", "unrecognized arguments: --learning-rate 3"),
        (flags, "--mesh pipeline=2", "unrecognized arguments: --mesh pipeline=2"),
        (in_meshes, "--mesh pipe=2", "each of the axes data, shard, pipeline, tensor at most once"),
        (in_meshes, "--mesh pipeline=two", "got 'pipeline=two'"),
        (in_meshes, "--mesh pipeline", "got 'pipeline'"),
        (in_meshes, "--mesh pipeline=2,pipeline=2", "got 'pipeline=2'"),
        (in_meshes, "--mesh pipeline=0", "pipeline of a Mesh must be a positive number of ranks"),
        (gpt_flags, "--width 64 --heads 3", "--heads must divide --width, got 3 heads"),
        (cnn_flags, "--dataset mnist", "--dataset: invalid choice: 'mnist'"),
        (cnn_flags, "--model resnet101", "--model: invalid choice: 'resnet101'"),
        (cnn_flags, "--model resnet50", "add --synthetic, or use --model resnet20"),
        (cnn_flags, "--warmup-epochs -1", "--warmup-epochs: must be a whole number from 0"),
        (cnn_flags, "--weight-decay -1", "--weight-decay: must be a number from 0, got '-1'"),
        (cnn_flags, "--precision half", "--precision: invalid choice: 'half'"),
        (cnn_flags, "--rounds 3", "--rounds needs --synthetic"),
        (cnn_flags, "--image-size 64", "--image-size needs --synthetic"),
        (cnn_flags, f"{RESNET50} --epochs 3", "--epochs has no effect with --synthetic"),
        (cnn_flags, f"{RESNET50} --no-augment", "--no-augment has no effect with --synthetic"),
        (cnn_flags, f"{RESNET50} --data-dir x", "--data-dir has no effect with --synthetic"),
        (cnn_flags, f"{RESNET50} --rounds 0", "--rounds: must be a positive whole number, got '0'"),
    ],
)
def test_a_wrong_flag_is_an_error_that_names_the_value_and_what_is_accepted(
    parse, line, complaint, capsys
):
    with pytest.raises(SystemExit) as end:
        parse(*line.split())
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("step", [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),  # at half and at three quarters
        ("cosine", [1, 0.853553, 0.5, 0.146447]),
        ("none", [1, 1, 1]),
    ],
)
def test_schedules_of_the_learning_rate(schedule, factors):
    epochs = len(factors)
    found = [common.rate_factor(schedule, epoch, epochs) for epoch in range(epochs)]
    assert found == pytest.approx(factors, abs=1e-6)
