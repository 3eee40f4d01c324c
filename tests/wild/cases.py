# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The scripts of the suite: where they lie, how they are called, how their batches are cut, and which are left out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One call of one script.

    Attributes:
        source: path of the script below the folder of sources.
        arguments: ``{out}`` stands for a fresh folder, ``{pets}`` for a folder of images.
        cut: samples of each rank in a global batch. Their sum is the script's own batch size times the ranks.
        samples: rows of the training split (0: all), for scripts that cannot be told.
        whole: what one process, which has the whole global batch, is given in addition.
        environment: variables that the user of such a script would set.
        intra_node: of the plan; scripts that change parameters themselves need ``collectives``.
        refusal: what the error of every rank says, where LSHDP refuses what the script does.
        random: why parameters cannot be compared, if so.
        name: tells calls of one script apart.
    """

    source: str
    arguments: str = ""
    cut: tuple[int, ...] = (3, 1)
    samples: int = 0
    whole: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    intra_node: str = "auto"
    refusal: str = ""
    random: str = ""
    name: str = ""

    @property
    def title(self) -> str:
        return self.source + (f" ({self.name})" if self.name else "")


FEATURES = "accelerate/examples/by_feature"
EXAMPLES = "accelerate/examples"
TRANSFORMERS = "transformers/examples/pytorch"
TRL = "trl/trl/scripts"

SIXTEEN = (21, 11)
CROPS = "each sample is cropped at random when it is read"
MASKS = "the collator masks random tokens of a batch"
LOCAL_BATCH_NORM = {"LSDP_BATCH_NORM": "local"}

_OUTPUT = "--output_dir {out}"
_TRAINER = (
    f"{_OUTPUT} --do_train --do_eval --per_device_train_batch_size 2 --num_train_epochs 2 --max_train_samples 18 "
    "--max_eval_samples 6 --report_to none --logging_steps 1 --save_strategy no --use_cpu True --seed 3"
)
_LOOP = f"{_OUTPUT} --per_device_train_batch_size 2 --num_train_epochs 2 --seed 3"
_BERT = "--model_name_or_path bert-base-cased"
_TRL = (
    f"{_OUTPUT} --model_name_or_path Qwen/Qwen2.5-0.5B --per_device_train_batch_size 2 --num_train_epochs 2 "
    "--report_to none --logging_steps 1 --save_strategy no --use_cpu True --bf16 False --seed 3 "
    "--gradient_checkpointing False --dtype auto"
)


def _examples() -> list[Case]:
    """accelerate's: they train three epochs with batches of 16."""

    def text(source: str, arguments: str = "", **rest: object) -> Case:
        return Case(source, arguments, cut=SIXTEEN, samples=100, **rest)

    def images(source: str) -> Case:
        return Case(
            source, "--data_dir {pets}", cut=(85, 43), environment=LOCAL_BATCH_NORM, random=CROPS + "; batch norm"
        )

    return [
        text(f"{EXAMPLES}/nlp_example.py"),
        text(f"{EXAMPLES}/complete_nlp_example.py", "--checkpointing_steps epoch --output_dir {out}"),
        images(f"{EXAMPLES}/cv_example.py"),
        images(f"{EXAMPLES}/complete_cv_example.py"),
        Case(f"{FEATURES}/automatic_gradient_accumulation.py", cut=(300, 212)),  # it starts at 256
        text(f"{FEATURES}/checkpointing.py", "--checkpointing_steps 2 --output_dir {out}"),
        text(f"{FEATURES}/cross_validation.py", "--num_folds 2"),
        text(f"{FEATURES}/ddp_comm_hook.py"),
        text(f"{FEATURES}/ddp_comm_hook.py", "--ddp_comm_hook fp16", refusal="comm_hook", name="fp16"),
        text(f"{FEATURES}/early_stopping.py"),
        text(f"{FEATURES}/gradient_accumulation.py", "--gradient_accumulation_steps 2"),
        # It asks a loader that does not shuffle for its length while the model is in eval mode, so both lengths
        # must be the same.
        Case(
            f"{FEATURES}/gradient_accumulation_for_autoregressive_models.py",
            "--gradient_accumulation_steps 2",
            whole="--per_device_batch_size 4",
        ),
        text(f"{FEATURES}/local_sgd.py", "--local_sgd_steps 2", refusal="LocalSGD"),
        text(f"{FEATURES}/memory.py"),
        text(f"{FEATURES}/multi_process_metrics.py"),
        text(f"{FEATURES}/profiler.py"),
        text(f"{FEATURES}/schedule_free.py", refusal="intra_node"),
        text(f"{FEATURES}/schedule_free.py", intra_node="collectives", name="collectives"),
        text(f"{FEATURES}/tracking.py", "--with_tracking --project_dir {out}"),
    ]


def _transformers() -> list[Case]:
    text, tokens = f"{TRANSFORMERS}/text-classification", f"{TRANSFORMERS}/token-classification"
    answers, choice = f"{TRANSFORMERS}/question-answering", f"{TRANSFORMERS}/multiple-choice"
    language, translation = f"{TRANSFORMERS}/language-modeling", f"{TRANSFORMERS}/translation"
    images = f"{TRANSFORMERS}/image-classification"
    glue = f"{_BERT} --task_name mrpc"
    classes = (
        f"{_BERT} --dataset_name nyu-mll/glue --dataset_config_name mrpc --text_column_names sentence1,sentence2 "
        "--label_column_name label --shuffle_train_dataset"
    )
    tagged = f"{_BERT} --dataset_name eriktks/conll2003"
    asked = f"{_BERT} --dataset_name rajpurkar/squad --max_seq_length 96 --doc_stride 32"
    columns = "--context_column context --question_column question --answer_column answers"
    spoken = f"--dataset_name rajpurkar/squad {columns} --max_seq_length 96"
    wiki = "--dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1"
    causal, masked = f"--model_name_or_path openai-community/gpt2 {wiki} --block_size 16", f"{_BERT} {wiki}"
    wmt = "--dataset_name wmt/wmt16 --dataset_config_name ro-en --source_lang en --target_lang ro"
    t5 = "--model_name_or_path google-t5/t5-small"
    marian = "--model_name_or_path Helsinki-NLP/opus-mt-en-ro --max_source_length 64 --max_target_length 64"
    written = "--val_max_target_length 16 --num_beams 1"
    prefixed = f'{t5} {wmt} --source_prefix "translate English to Romanian: "'
    pictures = "--model_name_or_path google/vit-base-patch16-224-in21k --dataset_name ylecun/mnist"
    pictures += " --label_column_name label --ignore_mismatched_sizes"
    accumulating = "--gradient_accumulation_steps 2"

    def loop(source: str, arguments: str, samples: int = 18, **rest: object) -> Case:
        return Case(source, f"{arguments} {_LOOP}", samples=samples, **rest)

    def trainer(source: str, arguments: str, **rest: object) -> Case:
        return Case(source, f"{arguments} {_TRAINER}", **rest)

    return [
        trainer(f"{text}/run_glue.py", glue),
        trainer(f"{text}/run_glue.py", f"{glue} {accumulating}", name="accumulation"),
        trainer(f"{text}/run_classification.py", classes),
        trainer(f"{text}/run_xnli.py", f"{_BERT} --language en"),
        loop(f"{text}/run_glue_no_trainer.py", glue),
        loop(f"{text}/run_glue_no_trainer.py", f"{glue} {accumulating}", name="accumulation"),
        loop(f"{text}/run_glue_no_trainer.py", f"{glue} --num_warmup_steps 3", name="warm-up"),
        trainer(f"{tokens}/run_ner.py", tagged),
        loop(f"{tokens}/run_ner_no_trainer.py", tagged),
        trainer(f"{answers}/run_qa.py", asked),
        # The model's softmax over positions runs over padding too: the loss of a sample depends on what it is
        # batched with, unless all batches are padded alike, as run_qa.py does by itself.
        loop(f"{answers}/run_qa_no_trainer.py", f"{asked} --pad_to_max_length", samples=8),
        trainer(f"{answers}/run_seq2seq_qa.py", f"{t5} {spoken}"),
        trainer(f"{choice}/run_swag.py", _BERT),
        loop(f"{choice}/run_swag_no_trainer.py", f"{_BERT} --dataset_name allenai/swag --dataset_config_name regular"),
        trainer(f"{language}/run_clm.py", causal),
        loop(f"{language}/run_clm_no_trainer.py", causal, samples=12),
        trainer(f"{language}/run_mlm.py", f"{masked} --line_by_line", random=MASKS),
        loop(f"{language}/run_mlm_no_trainer.py", f"{masked} --line_by_line True", random=MASKS),
        trainer(f"{translation}/run_translation.py", prefixed),
        trainer(f"{translation}/run_translation.py", f"{marian} {wmt}", name="Marian"),
        loop(f"{translation}/run_translation_no_trainer.py", f"{prefixed} {written}"),
        loop(f"{translation}/run_translation_no_trainer.py", f"{marian} {wmt} {written}", name="Marian"),
        trainer(f"{images}/run_image_classification.py", f"{pictures} --remove_unused_columns False", random=CROPS),
        loop(f"{images}/run_image_classification_no_trainer.py", pictures, random=CROPS),
    ]


def _trl() -> list[Case]:
    def script(file: str, data: str, arguments: str = "", **rest: object) -> Case:
        return Case(f"{TRL}/{file}.py", f"--dataset_name trl-lib/{data} {_TRL} {arguments}", samples=18, **rest)

    lora = "--use_peft --lora_r 4 --lora_alpha 8 --lora_dropout 0"
    return [
        script("sft", "Capybara"),
        script("sft", "Capybara", "--packing --max_length 64", name="packing"),
        script("sft", "Capybara", lora, name="LoRA"),
        script("dpo", "ultrafeedback_binarized"),
        script("reward", "ultrafeedback_binarized"),
        script("kto", "kto-mix-14k"),
    ]


CASES = [*_examples(), *_transformers(), *_trl()]

ANOTHER_ENGINE = "needs an engine in LSHDP's place: "
LEFT_OUT = {
    f"{FEATURES}/deepspeed_with_config_support.py": ANOTHER_ENGINE + "DeepSpeed",
    f"{FEATURES}/megatron_lm_gpt_pretraining.py": ANOTHER_ENGINE + "Megatron-LM",
    f"{FEATURES}/fsdp_with_peak_mem_tracking.py": ANOTHER_ENGINE + "the FSDP plugin",
    f"{EXAMPLES}/alst_ulysses_sequence_parallelism": ANOTHER_ENGINE + "DeepSpeed's sequence parallelism",
    f"{EXAMPLES}/torch_native_parallelism": ANOTHER_ENGINE + "tensor parallelism and the FSDP plugin",
    f"{EXAMPLES}/inference": "trains nothing",
    f"{EXAMPLES}/finetune_lm_tpu.py": "needs a TPU",
    f"{EXAMPLES}/multigpu_remote_launcher.py": "starts other machines",
    f"{TRANSFORMERS}/question-answering/run_qa_beam_search.py": "needs XLNet's own tokenizer",
    f"{TRANSFORMERS}/question-answering/run_qa_beam_search_no_trainer.py": "needs XLNet's own tokenizer",
    f"{TRANSFORMERS}/3d_parallel_checks.py": ANOTHER_ENGINE + "tensor parallelism",
    f"{TRANSFORMERS}/context_parallel.py": ANOTHER_ENGINE + "context parallelism",
}
