//go:build unix

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/tenurelib/tenure/internal/testkit"
)

// The servers' addresses refuse connections at once, and the context has ended.
func TestNoCommandShowsThePasswordOfAMistypedURL(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv(storeEnv, "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var all sync.WaitGroup
	most := make(chan struct{}, 32) // some wait a little before they give up
	for url := range testkit.MistypedURLs() {
		if isAbsolutePath(url) {
			continue
		}
		most <- struct{}{}
		all.Go(func() {
			defer func() { <-most }()
			for _, args := range [][]string{
				{"status", "--key", "k", "--store", url}, {"status", url}, {"list", url}, {url}, {"help", url},
				{"status", "-" + url}, {"status", "--" + url}, {"status", "-=" + url}, {"help", "status", url}, {"completion", "bash", url}, {"man", url}, {"drain", "--wait=" + url},
				{"run", "--store", "x.db", "--key", "k", url}, {"witness", "--store", "x.db", url}, {"run", "--store", "x.db", "--key", "k", "--on-loss", url, "true"}, {"list", "--json=" + url}, {"owner", "--ttl", url}, {"handover", "--wait", url},
			} {
				var out bytes.Buffer
				if run(ctx, args, &out, &out); testkit.ShowsPassword(out.String()) {
					t.Errorf("%q: %s", args, &out)
				}
			}
		})
	}
	all.Wait()
	if files, err := os.ReadDir("."); err != nil || len(files) > 0 {
		t.Errorf("a URL was taken for the path of a file: %v, %v", files, err)
	}
}

// isAbsolutePath reports whether a text is a path, whatever else it may have been meant to be.
func isAbsolutePath(text string) bool {
	return strings.HasPrefix(strings.TrimPrefix(text, "sqlite:"), "/")
}

func TestAnErrorNamesAnArgumentThatIsNoURL(t *testing.T) {
	for arg, want := range map[string]string{"status": `"status"`, "a.db": `"a.db"`, "a/b@c": "(not shown)"} {
		if status, _, stderr := tenureCommand(t, "version", arg); status != 2 || !strings.Contains(stderr, fmt.Sprintf("unexpected argument %s", want)) {
			t.Errorf("%s: exit status %d: %s", arg, status, stderr)
		}
	}
}

// The server accepts connections and never answers, so each command is still there to be looked at.
func TestNoCommandHasItsURLAmongItsArguments(t *testing.T) {
	t.Parallel()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
		}
	}()
	const password = "pa55word"
	url := fmt.Sprintf("postgres://app:%s@%s/db", password, server.Addr())
	more := map[string][]string{
		"run": {"--key", "k", "--", "sleep", "1000"}, "witness": {"--", "sleep", "1000"},
		"status": {"--key", "k"}, "owner": {"--key", "k/k"}, "watch": {"--key", "k"}, "resign": {"--key", "k"}, "handover": {"--key", "k", "--to", "a"},
		"drain": {"--replica", "a", "--wait", "1m"}, "undrain": {"--replica", "a"}, "list": {}, "migrate": {}, "doctor": {},
	}
	for _, c := range newRoot(&output{}).Commands() {
		args, ok := more[c.Name()]
		if c.Flags().Lookup("store") == nil || c.Name() == "unit" || c.Name() == "ddl" { // which connect to nothing, and end at once
			continue
		}
		if !ok {
			t.Errorf("this test lacks arguments for %s", c.Name())
			continue
		}
		t.Run(c.Name(), func(t *testing.T) {
			cmd := exec.Command(testBinary(t), append([]string{c.Name(), "--store", url}, args...)...)
			cmd.Env = append(environ(), asTenure+"=1")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			defer cmd.Process.Kill()
			var shown []byte
			eventually(t, soon, "the URL is not among the arguments", func() bool {
				var err error
				if shown, err = exec.Command("ps", "ww", "-o", "args=", "-p", fmt.Sprint(cmd.Process.Pid)).Output(); err != nil {
					t.Fatal(err)
				}
				return strings.Contains(string(shown), c.Name()) && !strings.Contains(string(shown), password)
			})
			if err := cmd.Process.Signal(syscall.Signal(0)); err != nil || strings.Contains(string(shown), "defunct") {
				t.Errorf("it has ended (%v), and ps shows %s", err, shown)
			}
		})
	}
}

// The source is all that an error can say about a text in which anything may be a password.
func TestAnErrorNamesTheSourceOfAURLThatCannotBeParsed(t *testing.T) {
	const mistyped = "postgres//app:pa55word@h/db"
	for _, url := range []string{mistyped, "postgres://app:pa55/word@h/db", "nats://app:pa55/word@h"} {
		t.Setenv(storeEnv, "")
		_, _, stderr := tenureCommand(t, "list", "--store", url)
		if !strings.Contains(stderr, "in --store") || strings.Contains(stderr, "55") {
			t.Errorf("--store %s: %s", url, stderr)
		}
		t.Setenv(storeEnv, url)
		_, _, stderr = tenureCommand(t, "list")
		if !strings.Contains(stderr, "in "+storeEnv) || strings.Contains(stderr, "55") {
			t.Errorf("%s=%s: %s", storeEnv, url, stderr)
		}
	}
}
