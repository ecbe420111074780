package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/proof/kit"
)

// The processes are this test binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-replica" {
		main()
		return
	}
	kit.Main(m)
}

func TestEachShardHasOneOwnerWhileProcessesComeAndGo(t *testing.T) {
	testkit.Slow(t)
	t.Run("postgres", func(t *testing.T) { run(t, kit.PostgresURL(t)) })
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
