package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit"
)

// The processes are this test binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-replica" {
		main()
		return
	}
	testkit.Main(m)
}

func TestEachShardHasOneOwnerWhileProcessesComeAndGo(t *testing.T) {
	testkit.Slow(t)
	t.Run("postgres", func(t *testing.T) { run(t, testkit.PostgresURL(t)) })
	t.Run("sqlite", func(t *testing.T) { run(t, "") })
}

func run(t *testing.T, url string) {
	t.Parallel()
	var out bytes.Buffer
	if err := conduct(t.Context(), url, &out); err != nil {
		t.Error(err)
	}
	t.Log(out.String())
	if lines := strings.Count(out.String(), "\n"); lines != 6+count {
		t.Errorf("%d lines are printed", lines)
	}
}
