//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Root runs the commands here if the test does, and somebody else owns the folder.
func TestNoCommandWritesThroughALinkBesideTheDatabase(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"migrate"}, {"doctor", "--look", "10ms"}, {"run", "--key", "k", "--once", "--", "true"}} {
		for what, exists := range map[string]bool{"a file": true, "nothing": false} {
			t.Run(args[0]+", "+what, func(t *testing.T) {
				dir, victim := t.TempDir(), filepath.Join(t.TempDir(), "victim")
				store := filepath.Join(dir, "x.db")
				if status, _, stderr := tenureCommand(t, "migrate", "--store", store); status != 0 {
					t.Fatal(stderr)
				}
				if os.Getuid() == 0 {
					for _, path := range []string{dir, store} {
						if err := os.Chown(path, 65534, 65534); err != nil {
							t.Fatal(err)
						}
					}
				}
				if exists {
					if err := os.WriteFile(victim, []byte("12345\n"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				lock := store + "-objects-lock"
				os.Remove(lock)
				if err := os.Symlink(victim, lock); err != nil {
					t.Fatal(err)
				}
				cmd := exec.CommandContext(t.Context(), testBinary(t), append([]string{args[0], "--store", store}, args[1:]...)...)
				cmd.Env = append(environ(), asTenure+"=1")
				out, err := cmd.CombinedOutput()
				if err == nil || !strings.Contains(string(out), lock+", which processes lock to claim the database, is a symbolic link") {
					t.Errorf("got %v: %s", err, out)
				}
				content, err := os.ReadFile(victim)
				if exists && (err != nil || string(content) != "12345\n") || !exists && err == nil {
					t.Errorf("it contains %q, %v", content, err)
				}
				if info, err := os.Stat(victim); exists && (err != nil || int(info.Sys().(*syscall.Stat_t).Uid) != os.Getuid()) {
					t.Errorf("it was given away: %v", err)
				}
			})
		}
	}
}
