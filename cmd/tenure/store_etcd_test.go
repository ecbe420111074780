//go:build unix

package main

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// startEtcd starts a server until the test ends, and returns its address.
func startEtcd(t *testing.T) (address string) {
	t.Helper()
	server, err := rig.NewEtcd(t.Context(), t.TempDir(), "--unsafe-no-fsync")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.End(syscall.SIGKILL) })
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return server.URL.Host
}

// etcdClient returns a client of a server that answers.
func etcdClient(t *testing.T, address string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + address}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	eventually(t, soon, "etcd answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := client.Get(ctx, "x")
		return err == nil
	})
	return client
}

func TestCommandsOnEtcd(t *testing.T) {
	t.Parallel()
	address := startEtcd(t)
	const password = "s3cret"
	s := newSite(t, "etcd://"+address+"/apps/web")
	client := etcdClient(t, address)

	status, _, stderr := tenureCommand(t, "status", "--store", s.store, "--key", "svc")
	if want := "tenure status: there is no key apps/web/epoch: run \"tenure migrate\"\n"; status != 1 || stderr != want {
		t.Errorf("at first: exit status %d and %q", status, stderr)
	}
	s.handsOver(t, clockOfHolder)

	for _, test := range []struct {
		args         []string
		status       int
		store, wants string
	}{
		{[]string{"list", "--sessions"}, 2, s.store, "on Postgres or SQLite only"},
		{[]string{"migrate", "--print"}, 2, s.store, "run migrate once as a user who may"},
		{[]string{"list", "--table", "mine"}, 2, s.store, "add /PREFIX to the URL"},
		{[]string{"list"}, 2, "etcd://h/?creds=f", `a parameter "creds"`},
		{[]string{"list"}, 2, "etcd://h/?ca=/dev/null", "an etcds:// URL"},
		{[]string{"list"}, 2, "etcds://h/?ca=/dev/null", "has no certificate"},
		{[]string{"list"}, 2, "etcds://h/?cert=/dev/null", "needs key"},
		{[]string{"list"}, 2, "etcd://app@h", "a user without a password"},
		{[]string{"list"}, 2, "etcd://app:" + password + "@h:port", "%XX"},
		{[]string{"list"}, 2, "etcd://host/prefix@h", "%XX"}, // host is not a user
		{[]string{"list"}, 2, "etcd://h/a%", "%XX"},
		{[]string{"list"}, 2, "etcd://h/a#b", "%XX"},
		{[]string{"list"}, 1, s.store + "%2Fw%65b", "there is no key apps/web/web/epoch"},
		{[]string{"list"}, 1, "etcd://127.0.0.1:1", "connection refused"},
		{[]string{"list"}, 1, "etcd://127.0.0.1:1", "no answer from etcd (prefix tenure/ on 127.0.0.1:1)"},
		{[]string{"list"}, 1, strings.Replace(s.store, "etcd:", "etcds:", 1), "no answer from etcd (prefix apps/web/ on " + address},
	} {
		status, stdout, stderr := tenureCommand(t, append(test.args, "--store", test.store)...)
		if status != test.status || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, test.wants) || strings.Contains(stderr, password) {
			t.Errorf("%q on %s: exit status %d, %q and %q", test.args, test.store, status, stdout, stderr)
		}
	}

	// With users.
	for _, do := range []func() error{
		func() error { _, err := client.UserAdd(t.Context(), "root", "r00t"); return err },
		func() error { _, err := client.UserGrantRole(t.Context(), "root", "root"); return err },
		func() error { _, err := client.UserAdd(t.Context(), "guest", password); return err },
		func() error { _, err := client.AuthEnable(t.Context()); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	as := func(user string) string { return strings.Replace(s.store, "//", "//"+user+"@", 1) }
	if status, _, stderr := tenureCommand(t, "migrate", "--store", as("root:r00t")); status != 0 {
		t.Errorf("as root: %q", stderr)
	}
	for name, store := range map[string]string{
		"a wrong password": as("guest:" + password + "2"), "no permission": as("guest:" + password), "no user": s.store,
	} {
		status, stdout, stderr := tenureCommand(t, "migrate", "--store", store)
		if status != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "needs a role") || strings.Contains(stderr, password) {
			t.Errorf("%s: exit status %d, %q and %q", name, status, stdout, stderr)
		}
		t.Log(stderr)
	}
}
