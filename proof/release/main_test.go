package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"aead.dev/minisign"
)

func TestTheModulesOfAReleaseCanBeFetchedAndTheCommandInstalled(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the command and its dependencies")
	}
	repo, key := repository(t)
	offline(t)
	if _, err := release(repo, "v0.1.0", key, []platform{{runtime.GOOS, runtime.GOARCH}}); err != nil {
		t.Fatal(err)
	}
	env := consumer(t, repo)
	dist := filepath.Join(repo, "dist", "v0.1.0")
	binary := filepath.Join(dist, "tenure-v0.1.0-"+runtime.GOOS+"-"+runtime.GOARCH)

	t.Run("the library", func(t *testing.T) {
		dir := empty(t, env, `package main

import (
	"context"
	"fmt"

	"github.com/tenurelib/tenure"
)

func main() {
	lease, err := tenure.NewLease(tenure.Static(), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		panic(err)
	}
	fmt.Println(tenure.Do(context.Background(), lease, func(context.Context) error { return nil }))
}
`)
		sh(t, dir, env, "go", "get", root)
		if got, want := sh(t, dir, env, "go", "run", "-mod=mod", "."), "<nil>\n"; !strings.HasSuffix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		// What only nested modules need must not come with it.
		all := sh(t, dir, env, "go", "list", "-m", "all")
		for _, client := range []string{"nats", "etcd", "opentelemetry"} {
			if strings.Contains(all, client) {
				t.Errorf("a program that needs the library gets a module named %s: %s", client, all)
			}
		}
	})
	t.Run("the metrics", func(t *testing.T) {
		dir := empty(t, env, `package main

import (
	"fmt"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/oteltenure"
)

func main() {
	lease, err := tenure.NewLease(tenure.Static(), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		panic(err)
	}
	trace, _, err := oteltenure.ObserveLease(noop.Meter{}, lease)
	fmt.Println(trace != nil, err)
}
`)
		sh(t, dir, env, "go", "get", root+"/oteltenure")
		if got, want := sh(t, dir, env, "go", "run", "-mod=mod", "."), "true <nil>\n"; !strings.HasSuffix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("the command", func(t *testing.T) {
		bin := t.TempDir()
		sh(t, t.TempDir(), append(env, "GOBIN="+bin), "go", "install", root+"/cmd/tenure@v0.1.0")
		if got := sh(t, bin, env, filepath.Join(bin, "tenure"), "-h"); !strings.Contains(got, "Usage:") {
			t.Errorf("tenure -h: got %q", got)
		}
		if got := sh(t, bin, env, binary, "version"); !strings.HasPrefix(got, "tenure v0.1.0, go") {
			t.Errorf("the released binary says %q", got)
		}
		if digest(t, filepath.Join(bin, "tenure")) != digest(t, binary) {
			t.Error("the released binary is not the one that go install builds")
		}
	})
	t.Run("the bill of materials", func(t *testing.T) { consistsOf(t, binary) })
	t.Run("the page", func(t *testing.T) {
		commands := pageOfReleases(t)
		refusesAnyChange(t, dist, func() error { return asThePageSays(dist, commands, filepath.Join(repo, publicKey)) })
	})
	// The checksums that were written before the version was published are the right ones.
	t.Run("a checkout of the tag", func(t *testing.T) {
		for _, m := range []string{"oteltenure", "stores/natstenure", "stores/etcdtenure", "stores/kubetenure", "stores/mysqltenure", "cmd/tenure"} {
			sh(t, repo, nil, "git", "checkout", "--quiet", m+"/v0.1.0")
			sh(t, filepath.Join(repo, m), env, "go", "build", "-mod=readonly", "./...")
		}
	})
}

func TestAReleaseLeavesTheCheckoutAndTheRemoteAlone(t *testing.T) {
	repo, key := repository(t)
	remote := t.TempDir()
	sh(t, remote, nil, "git", "init", "--quiet", "--bare")
	sh(t, repo, nil, "git", "remote", "add", "origin", remote)
	before := sh(t, repo, nil, "git", "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
	if _, err := release(repo, "v0.1.0", key, nil); err != nil {
		t.Fatal(err)
	}
	if after := sh(t, repo, nil, "git", "rev-parse", "HEAD", "--abbrev-ref", "HEAD"); after != before {
		t.Errorf("HEAD: got %s, want %s", after, before)
	}
	if changes := sh(t, repo, nil, "git", "status", "--porcelain"); changes != "" {
		t.Errorf("changed: %s", changes)
	}
	if refs := sh(t, remote, nil, "git", "for-each-ref"); refs != "" {
		t.Errorf("pushed: %s", refs)
	}
	want := "release-v0.1.0\ncmd/tenure/v0.1.0\noteltenure/v0.1.0\nstores/etcdtenure/v0.1.0\nstores/kubetenure/v0.1.0\nstores/mysqltenure/v0.1.0\nstores/natstenure/v0.1.0\nv0.1.0\n"
	if refs := sh(t, repo, nil, "git", "for-each-ref", "--format=%(refname:short)", "--contains=release-v0.1.0"); refs != want {
		t.Errorf("got the branch and tags %s, want %s", refs, want)
	}
}

func TestAReleaseThatIsRefusedMakesNothing(t *testing.T) {
	original, key := repository(t)
	for _, test := range []struct {
		name, version, want string
		prepare             string // a command
	}{
		{"no version", "", "not a semantic version", ""},
		{"a version without its v", "0.1.0", "not a semantic version", ""},
		{"half a version", "v0.1", "not a semantic version", ""},
		{"a version that needs another path", "v2.0.0", "needs " + root + "/v2", ""},
		{"a changed file", "v0.1.0", "uncommitted changes", "echo >>README.md"},
		{"a new file", "v0.1.0", "uncommitted changes", "echo >new"},
		{"a tag that exists", "v0.1.0", "already refs/tags/v0.1.0", "git tag v0.1.0"},
		{"a nested module's tag that exists", "v0.1.0", "already refs/tags/oteltenure/v0.1.0", "git tag oteltenure/v0.1.0"},
		{"another replacement", "v0.1.0", "replaces github.com/google/uuid",
			"echo 'replace github.com/google/uuid => ../uuid' >>oteltenure/go.mod; git commit -qam replacement"},
		{"another key", "v0.1.0", "not the one of release.pub", "sed -i 's/^RW.*/RWQ'$(printf %053d)'/' release.pub; git commit -qam key"},
		{"no public key", "v0.1.0", "minisign -G -p release.pub", "git rm -q release.pub; git commit -qm key"},
		{"files of such a release", "v0.1.0", "file exists", "mkdir -p dist/v0.1.0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			repo := t.TempDir()
			sh(t, repo, nil, "git", "clone", "--quiet", original, ".")
			sh(t, repo, nil, "sh", "-c", test.prepare)
			before := sh(t, repo, nil, "git", "for-each-ref")
			_, err := release(repo, test.version, key, nil)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %s", err, test.want)
			}
			if after := sh(t, repo, nil, "git", "for-each-ref"); after != before {
				t.Errorf("got %s, want %s", after, before)
			}
			if trees := sh(t, repo, nil, "git", "worktree", "list"); strings.Count(trees, "\n") != 1 {
				t.Errorf("left behind: %s", trees)
			}
			if files, _ := filepath.Glob(filepath.Join(repo, "dist", "*", "*")); files != nil {
				t.Errorf("left behind: %s", files)
			}
		})
	}
}

// repository returns a repository with one commit, of this one's files as they are now and the public half of
// a new key. It sets who commits.
func repository(t *testing.T) (dir string, key minisign.PrivateKey) {
	for _, who := range []string{"AUTHOR", "COMMITTER"} {
		t.Setenv("GIT_"+who+"_NAME", "test")
		t.Setenv("GIT_"+who+"_EMAIL", "test@example.com")
	}
	dir = t.TempDir()
	top := strings.TrimSpace(sh(t, ".", nil, "git", "rev-parse", "--show-toplevel"))
	sh(t, top, nil, "sh", "-c", `tar -c --exclude=./.git --exclude=./dist . | tar -x -C "$0"`, dir)
	public, key, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := public.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, publicKey), append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	sh(t, dir, nil, "sh", "-c", "git init --quiet && git add --all && git commit --quiet --message all")
	return dir, key
}

// offline keeps the go command from asking for the checksums of modules: it trusts the module cache.
func offline(t *testing.T) { t.Setenv("GOSUMDB", "off") }

// consumer returns the environment of a user who has never seen these modules, and gets them from
// the tags of that repository. All others come from the module cache where it has them. With
// -trimpath the build cache serves for modules that lie elsewhere.
func consumer(t *testing.T, repo string) []string {
	fields := strings.Fields(sh(t, ".", nil, "go", "env", "GOMODCACHE", "GOPROXY"))
	cache, upstream := fields[0], fields[1]
	return append(append(os.Environ(), fetchedFrom(repo)...),
		"GOMODCACHE="+t.TempDir(),
		"GOPROXY=file://"+filepath.Join(cache, "cache", "download")+","+upstream,
		"GOFLAGS=-modcacherw -trimpath",
		"GOSUMDB=off",
		"CGO_ENABLED=0", // so that all is built once
		"GOWORK=off",
	)
}

// empty returns the directory of a new module that has this program.
func empty(t *testing.T, env []string, program string) string {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(program), 0o644); err != nil {
		t.Fatal(err)
	}
	sh(t, dir, env, "go", "mod", "init", "example.com/program")
	return dir
}

// sh runs a command and returns what it printed.
func sh(t *testing.T, dir string, env []string, command ...string) string {
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Env = dir, env
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
	return string(out)
}
