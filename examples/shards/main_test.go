package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// The processes are this test binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-replica" {
		main()
		return
	}
	pgtest.Main(m)
}

func TestEachShardHasOneOwnerWhileProcessesComeAndGo(t *testing.T) {
	t.Run("postgres", func(t *testing.T) { run(t, pgtest.URL(t)) })
	t.Run("sqlite", func(t *testing.T) { run(t, "") })
}

func run(t *testing.T, url string) {
	t.Parallel()
	var out bytes.Buffer
	if err := conduct(t.Context(), url, os.Getenv("SHARDS_SVG"), &out); err != nil {
		t.Error(err)
	}
	t.Log(out.String())
	if lines := strings.Count(out.String(), "\n"); lines != 6+count {
		t.Errorf("%d lines are printed", lines)
	}
}
