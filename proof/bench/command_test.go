package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestAWrongFlagIsOneLineAndExit2(t *testing.T) {
	for _, args := range [][]string{
		{"-measure", "speed"},
		{"-peer", "tenure,zookeeper"},
		{"-n", "-1"},
		{"-n", "many"},
		{"-duration", "0s"},
		{"-colour"},
		{"acquire"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), args, &stdout, &stderr); code != 2 {
			t.Errorf("%v: got exit code %d, want 2", args, code)
		}
		if text := stderr.String(); strings.Count(text, "\n") != 1 || !strings.HasSuffix(text, "\n") {
			t.Errorf("%v: got %q, want one line", args, text)
		}
	}
}

func TestHelpNamesEveryMeasureAndPeer(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := run(t.Context(), []string{"-h"}, &stdout, &stderr); code != 0 {
		t.Fatalf("got exit code %d, want 0", code)
	}
	for _, m := range measures {
		if !strings.Contains(stdout.String(), "\n  "+m.name+" ") {
			t.Errorf("%s is not in it", m.name)
		}
	}
	for _, p := range peers {
		if !strings.Contains(stdout.String(), "\n  "+p.name+" ") {
			t.Errorf("%s is not in it", p.name)
		}
	}
}

func TestARunMeasuresAndLeavesNothingBehind(t *testing.T) {
	svg := filepath.Join(t.TempDir(), "plot.svg")
	// Not t.TempDir, which only the tests' own user may read.
	temp, err := os.MkdirTemp("", "tenure-bench-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(temp)
	if err := os.Chmod(temp, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", temp)
	before := runtime.NumGoroutine()

	var stdout, stderr bytes.Buffer
	args := []string{"-quick", "-json", "-svg", svg, "-measure", "acquire,handover,statements,rows", "-peer", "floor,tenure,etcd"}
	if code := run(t.Context(), args, &stdout, &stderr); code != 0 {
		if strings.Contains(stderr.String(), "no PostgreSQL") && os.Getenv("TENURE_REQUIRE_POSTGRES") != "1" {
			t.Skip(&stderr)
		}
		t.Fatalf("got exit code %d, want 0\n%s", code, &stderr)
	}
	var doc struct {
		Machine facts
		Records []record
		Notes   []note
	}
	if err := json.Unmarshal(stdout.Bytes(), &doc); err != nil {
		t.Fatalf("%v in\n%s", err, &stdout)
	}
	doc.Notes = slices.DeleteFunc(doc.Notes, func(n note) bool { return n.Peer == "machine" }) // its load
	if len(doc.Notes) > 0 || doc.Machine.Postgres == "" || !doc.Machine.Durable {
		t.Errorf("got notes %v, machine %+v", doc.Notes, doc.Machine)
	}
	for _, want := range []record{
		{Measure: "acquire", Peer: "tenure", Metric: "pair p50"},
		{Measure: "acquire", Peer: "etcd", Metric: "16 workers"},
		{Measure: "handover", Peer: "tenure", Metric: "10 standbys p99"},
		{Measure: "handover", Peer: "floor", Metric: "NOTIFY alone p50"},
		{Measure: "statements", Peer: "tenure", Metric: "steal"},
		{Measure: "rows", Peer: "river", Metric: "batches of 100"},
		{Measure: "rows", Peer: "claims", Metric: "killed: finished once by others"},
	} {
		found := false
		for _, r := range doc.Records {
			if r.Measure == want.Measure && r.Peer == want.Peer && r.Metric == want.Metric {
				found = r.Value > 0 && r.N > 0
			}
		}
		if !found {
			t.Errorf("no figure for %s, %s, %s", want.Measure, want.Peer, want.Metric)
		}
	}
	if plot, err := os.ReadFile(svg); err != nil || !bytes.Contains(plot, []byte("tenure")) {
		t.Errorf("the plot: %v", err)
	}

	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	for deadline := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines more than before:\n%s", runtime.NumGoroutine()-before, stacks[:runtime.Stack(stacks, true)])
		}
	}
}
