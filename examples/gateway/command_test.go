//go:build unix

package main

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tenurelib/tenure"
)

func TestACheckIsAskedForTheRoleAndFailsAsItsCommandDoes(t *testing.T) {
	check := command(`test "$ROLE" = standby`).check()
	if err := check(t.Context(), tenure.RoleStandby); err != nil {
		t.Errorf("as a standby: %v", err)
	}
	for _, role := range []tenure.Role{tenure.RoleConfirming, tenure.RoleHolder} {
		if err := check(t.Context(), role); err == nil || !strings.Contains(err.Error(), "exit status 1") {
			t.Errorf("as %v: got %v, want its exit status", role, err)
		}
	}
	if command("").check() != nil || command("").fence("a", quiet) != nil {
		t.Error("no command is a check, or a fence")
	}
}

func TestARestartedGatewayDoesNotFenceItself(t *testing.T) {
	fence := command("exit 1").fence("a", quiet)
	if err := fence(t.Context(), tenure.Holding{Holder: "a"}); err != nil {
		t.Errorf("an earlier run of a is cut off: %v", err)
	}
}

func TestACommandEndsWithItsContextAndTakesItsChildrenAlong(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pid")
	t.Setenv("FILE", file)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	returned := make(chan error, 1)
	go func() {
		returned <- command(`sleep 1000 & echo $! >"$FILE.new"; mv "$FILE.new" "$FILE"; wait`).run(ctx, "ROLE", "standby")
	}()
	var child int
	eventually(t, soon, "the command has a child", func() bool {
		pid, err := os.ReadFile(file)
		if err != nil {
			return false
		}
		child, err = strconv.Atoi(strings.TrimSpace(string(pid)))
		return err == nil
	})
	cancel()
	if err := <-returned; err == nil {
		t.Error("the command that was killed returned nil")
	}
	eventually(t, soon, "the child is gone", func() bool {
		_, alive, err := inspectProcess(child)
		return err == nil && !alive
	})
}
