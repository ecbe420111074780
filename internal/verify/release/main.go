// Command release commits and tags a version of the published modules, in the repository
// that contains the current directory:
//
//	go run . v0.1.0
//
// While the library is developed, its nested modules replace the root module by the
// directory above them. A program that depends on one of them ignores that replacement, so
// in a release they require the root module at its version. The commit is on a branch of its
// own, release-v0.1.0, and each module has a tag. The checked-out branch does not change,
// and nothing is pushed.
package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/zip"
)

const root = "github.com/tenurelib/tenure"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: make release VERSION=v0.1.0")
		os.Exit(2)
	}
	refs, err := release(".", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
	fmt.Println("To publish the release: git push --atomic origin", strings.Join(refs, " "))
}

// release makes the branch and the tags, and returns their names, or makes none of them.
func release(dir, version string) (refs []string, err error) {
	if semver.Canonical(version) != version || version == "" {
		return nil, fmt.Errorf("%q is not a semantic version such as v0.1.0", version)
	}
	if major := semver.Major(version); major != "v0" && major != "v1" {
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
	modules, err := published(top)
	if err != nil {
		return nil, err
	}
	refs = []string{"refs/heads/release-" + version}
	for _, m := range modules {
		refs = append(refs, "refs/tags/"+path.Join(m, version))
	}
	taken, err := git(top, append([]string{"for-each-ref", "--format=%(refname)"}, refs...)...)
	if err != nil {
		return nil, err
	}
	if taken != "" {
		return nil, fmt.Errorf("there is already %s", strings.Join(strings.Fields(taken), " and "))
	}

	// The commit is made in a worktree of its own, so that a failure leaves nothing behind.
	temp, err := os.MkdirTemp("", "tenure-release-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	tree := filepath.Join(temp, "tree")
	if _, err := git(top, "worktree", "add", "--quiet", "--detach", tree, "HEAD"); err != nil {
		return nil, err
	}
	defer git(top, "worktree", "remove", "--force", tree)
	sums, err := checksums(top, temp, version)
	if err != nil {
		return nil, err
	}
	for _, m := range modules {
		if err := require(filepath.Join(tree, m), version, sums); err != nil {
			return nil, err
		}
	}
	if _, err := git(tree, "commit", "--quiet", "--allow-empty", "--all", "--message", "Release "+version); err != nil {
		return nil, err
	}
	commit, err := git(tree, "rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	for _, ref := range refs {
		if _, err := git(top, "update-ref", ref, commit, ""); err != nil { // the empty value: only if it doesn't exist
			return nil, err
		}
	}
	return refs, nil
}

// published returns the directories of the modules that programs depend on, relative to the
// repository: all but those of examples and of what verifies the library.
func published(top string) (dirs []string, err error) {
	files, err := git(top, "ls-files", "go.mod", "*/go.mod")
	if err != nil {
		return nil, err
	}
	for _, file := range strings.Fields(files) {
		if !strings.HasPrefix(file, "internal/") && !strings.HasPrefix(file, "examples/") {
			dirs = append(dirs, path.Dir(file))
		}
	}
	return dirs, nil
}

// checksums returns what a go.sum says of the root module. Its content does not depend on
// what the release changes, because that is in nested modules.
func checksums(top, temp, version string) ([]string, error) {
	file, err := os.Create(filepath.Join(temp, "root.zip"))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if err := zip.CreateFromVCS(file, module.Version{Path: root, Version: version}, top, "HEAD", ""); err != nil {
		return nil, err
	}
	content, err := dirhash.HashZip(file.Name(), dirhash.Hash1)
	if err != nil {
		return nil, err
	}
	goMod, err := dirhash.Hash1([]string{"go.mod"}, func(string) (io.ReadCloser, error) {
		return os.Open(filepath.Join(top, "go.mod"))
	})
	if err != nil {
		return nil, err
	}
	return []string{
		fmt.Sprintf("%s %s %s\n", root, version, content),
		fmt.Sprintf("%s %s/go.mod %s\n", root, version, goMod),
	}, nil
}

// require makes the module in dir, unless it is the root module, require the root module at
// that version.
func require(dir, version string, sums []string) error {
	name := filepath.Join(dir, "go.mod")
	data, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	file, err := modfile.Parse(name, data, nil)
	if err != nil {
		return err
	}
	nested := file.Module.Mod.Path != root
	if nested {
		if err := file.AddRequire(root, version); err != nil {
			return err
		}
		if err := file.DropReplace(root, ""); err != nil {
			return err
		}
		file.Cleanup()
		if data, err = file.Format(); err != nil {
			return err
		}
		if err := os.WriteFile(name, data, 0o644); err != nil {
			return err
		}
	}
	if len(file.Replace) > 0 {
		return fmt.Errorf("%s replaces %s: a program that depends on it would not", name, file.Replace[0].Old)
	}
	if !nested {
		return nil
	}
	name = filepath.Join(dir, "go.sum")
	if data, err = os.ReadFile(name); err != nil {
		return err
	}
	return os.WriteFile(name, append(data, strings.Join(sums, "")...), 0o644)
}

// git runs git in dir and returns its output, without the newline at the end.
func git(dir string, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w\n%s", args[0], err, &stderr)
	}
	return strings.TrimSuffix(string(out), "\n"), nil
}
