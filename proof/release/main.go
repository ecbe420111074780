// Command release commits and tags a version of the published modules, in the repository
// that contains the current directory, and builds and signs the binaries of the command:
//
//	go run . v0.1.0 ~/.minisign/minisign.key
//
// While the library is developed, its nested modules replace the root module, and each other,
// by their directories. A program that depends on one of them ignores that replacement, and go
// install refuses it, so in a release they require each other at its version. The commit is on a
// branch of its own, release-v0.1.0, and each module has a tag. The checked-out branch does not
// change, and nothing is pushed. The binaries, a CycloneDX file for each that says what it consists of,
// their checksums and the signature of these are in the directory dist/v0.1.0.
package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"aead.dev/minisign"
)

const root = "github.com/tenurelib/tenure"

var semantic = regexp.MustCompile(`^v(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$`)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: make release VERSION=v0.1.0 [KEY=FILE]")
		os.Exit(2)
	}
	key, err := readKey(os.Args[2])
	var refs []string
	if err == nil {
		refs, err = release(".", os.Args[1], key, platforms)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
	fmt.Println("To publish the release: git push --atomic origin", strings.Join(refs, " "))
	fmt.Println("Then attach the files in dist/" + os.Args[1] + " to it.")
}

// release makes the branch, the tags and the directory dist/VERSION, and returns the names of the first
// two, or makes none of them.
func release(dir, version string, key minisign.PrivateKey, platforms []platform) (refs []string, err error) {
	if !semantic.MatchString(version) {
		return nil, fmt.Errorf("%q is not a semantic version such as v0.1.0", version)
	}
	if major, _, _ := strings.Cut(version, "."); major != "v0" && major != "v1" {
		return nil, fmt.Errorf("%s needs %s/%s as the module's path", version, root, major)
	}
	top, err := git(dir, "rev-parse", "--show-toplevel")
	if err != nil {
		return nil, err
	}
	changes, err := git(top, "status", "--porcelain")
	if err != nil {
		return nil, err
	}
	if changes != "" {
		return nil, fmt.Errorf("there are uncommitted changes; commit or stash them first:\n%s", changes)
	}
	if err := checkKey(top, key); err != nil {
		return nil, err
	}
	modules, err := inOrder(top)
	if err != nil {
		return nil, err
	}
	refs = []string{"refs/heads/release-" + version}
	for _, m := range modules {
		refs = append(refs, "refs/tags/"+path.Join(m.dir, version))
	}
	taken, err := git(top, append([]string{"for-each-ref", "--format=%(refname)"}, refs...)...)
	if err != nil {
		return nil, err
	}
	if taken != "" {
		return nil, fmt.Errorf("there is already %s", strings.Join(strings.Fields(taken), " and "))
	}

	dist := filepath.Join(top, "dist", version)
	if err := os.MkdirAll(filepath.Dir(dist), 0o755); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dist, 0o755); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dist)
		}
	}()

	// The commit is made in a worktree of its own, so that a failure leaves nothing behind. The go
	// command gets the modules from a clone, which alone has the tags until all has succeeded.
	temp, err := os.MkdirTemp("", "tenure-release-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	tree, clone := filepath.Join(temp, "tree"), filepath.Join(temp, "clone")
	if _, err := git(top, "worktree", "add", "--quiet", "--detach", tree, "HEAD"); err != nil {
		return nil, err
	}
	defer git(top, "worktree", "remove", "--force", tree)
	if _, err := git(top, "clone", "--quiet", "--bare", "--shared", ".", clone); err != nil {
		return nil, err
	}
	if _, err := git(tree, "commit", "--quiet", "--allow-empty", "--message", "Release "+version); err != nil {
		return nil, err
	}
	sums := make(map[string]string) // of those modules that are as they will be published
	for _, m := range modules {
		if err := require(filepath.Join(tree, m.dir), version, sums); err != nil {
			return nil, err
		}
		if _, err := git(tree, "commit", "--quiet", "--amend", "--no-edit", "--allow-empty", "--all"); err != nil {
			return nil, err
		}
		if _, err := git(tree, "push", "--quiet", clone, "HEAD:refs/tags/"+path.Join(m.dir, version)); err != nil {
			return nil, err
		}
		if sums[m.path], err = checksums(temp, clone, m.path, version); err != nil {
			return nil, err
		}
	}
	commit, err := git(tree, "rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	at, err := git(tree, "show", "--no-patch", "--format=%cI", commit)
	if err != nil {
		return nil, err
	}
	for _, p := range platforms {
		if err := build(temp, clone, dist, version, at, p); err != nil {
			return nil, err
		}
	}
	if err := sign(dist, version, key); err != nil {
		return nil, err
	}
	for _, ref := range refs {
		if _, err := git(top, "update-ref", ref, commit, ""); err != nil { // the empty value: only if it doesn't exist
			return nil, err
		}
	}
	return refs, nil
}

// published is a module that programs depend on.
type published struct {
	path string
	dir  string // relative to the repository
}

// inOrder returns all modules except examples and the proof. Each module comes after the modules that
// it requires, because its go.sum has their checksums.
func inOrder(top string) (modules []published, err error) {
	names, err := git(top, "ls-files", "go.mod", "*/go.mod")
	if err != nil {
		return nil, err
	}
	files, dirs := make(map[string]modFile), make(map[string]string) // by the module's path
	for _, name := range strings.Fields(names) {
		if strings.HasPrefix(name, "proof/") || strings.HasPrefix(name, "examples/") {
			continue
		}
		file, err := parse(filepath.Join(top, name))
		if err != nil {
			return nil, err
		}
		files[file.Module.Path], dirs[file.Module.Path] = file, path.Dir(name)
	}
	var add func(path string)
	add = func(path string) {
		file, ok := files[path]
		delete(files, path)
		if !ok { // it has been added, or is another project's
			return
		}
		for _, needs := range file.Require {
			add(needs.Path)
		}
		modules = append(modules, published{path, dirs[path]})
	}
	for _, path := range slices.Sorted(maps.Keys(files)) {
		add(path)
	}
	return modules, nil
}

// modFile is what go mod edit -json prints of a go.mod file.
type modFile struct {
	Module  struct{ Path string }
	Require []struct{ Path string }
	Replace []struct{ Old struct{ Path string } }
}

func parse(name string) (file modFile, err error) {
	out, err := run(exec.Command("go", "mod", "edit", "-json", name))
	if err != nil {
		return file, err
	}
	return file, json.Unmarshal([]byte(out), &file)
}

// checksums returns what a go.sum says of a module whose version is tagged in the clone.
func checksums(temp, clone, path, version string) (string, error) {
	cmd := exec.Command("go", "mod", "download", "-json", path+"@"+version)
	cmd.Dir = temp
	cmd.Env = append(os.Environ(), fetchedFrom(clone)...)
	cmd.Env = append(cmd.Env, "GOMODCACHE="+filepath.Join(temp, "cache"), "GOFLAGS=-modcacherw", "GOWORK=off")
	out, err := run(cmd)
	if err != nil {
		return "", err
	}
	var is struct{ Sum, GoModSum string }
	err = json.Unmarshal([]byte(out), &is)
	return fmt.Sprintf("%[1]s %[2]s %[3]s\n%[1]s %[2]s/go.mod %[4]s\n", path, version, is.Sum, is.GoModSum), err
}

// fetchedFrom returns the environment in which the go command gets this project's modules from a
// repository on this machine.
func fetchedFrom(repo string) []string {
	return []string{
		"GOPRIVATE=" + root,
		"GIT_CONFIG_COUNT=1",
		"GIT_CONFIG_KEY_0=url.file://" + repo + ".insteadOf",
		"GIT_CONFIG_VALUE_0=https://" + root,
	}
}

// require makes the module in dir require this repository's modules at that version. Sums has
// the checksums of the modules that it may require.
func require(dir, version string, sums map[string]string) error {
	name := filepath.Join(dir, "go.mod")
	file, err := parse(name)
	if err != nil {
		return err
	}
	needed := ""
	edit := exec.Command("go", "mod", "edit")
	for _, needs := range file.Require {
		if sum := sums[needs.Path]; sum != "" {
			needed += sum
			edit.Args = append(edit.Args, "-require="+needs.Path+"@"+version, "-dropreplace="+needs.Path)
		}
	}
	for _, r := range file.Replace {
		if sums[r.Old.Path] == "" {
			return fmt.Errorf("%s replaces %s: a program that depends on it would not", name, r.Old.Path)
		}
	}
	if needed == "" {
		return nil
	}
	edit.Args = append(edit.Args, name)
	if _, err := run(edit); err != nil {
		return err
	}
	name = filepath.Join(dir, "go.sum")
	data, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(data, needed...), 0o644)
}

// git runs git in dir and returns its output.
func git(dir string, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	return run(cmd)
}

// run runs a command and returns its output, without the newline at the end.
func run(cmd *exec.Cmd) (string, error) {
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args[:2], " "), err, &stderr)
	}
	return strings.TrimSuffix(string(out), "\n"), nil
}
