package main

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"aead.dev/minisign"
)

// consistsOf compares what the CycloneDX file of a binary lists with what the go command finds in it.
func consistsOf(t *testing.T, binary string) {
	text, err := os.ReadFile(binary + ".cdx.json")
	if err != nil {
		t.Fatal(err)
	}
	type part struct {
		Name, Version, Purl string
		Hashes              []struct{ Alg, Content string }
	}
	var bom struct {
		BomFormat, SpecVersion string
		Metadata               struct {
			Timestamp string
			Component part
		}
		Components   []part
		Dependencies []struct{ DependsOn []string }
	}
	if err := json.Unmarshal(text, &bom); err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, c := range bom.Components {
		got = append(got, c.Name+" "+c.Version)
		if c.Name != "stdlib" && len(c.Hashes) != 1 || c.Purl != "pkg:golang/"+c.Name+"@"+c.Version {
			t.Errorf("%+v", c)
		}
	}
	for line := range strings.Lines(sh(t, ".", nil, "go", "version", "-m", binary)) {
		if fields := strings.Fields(line); fields[0] == "dep" {
			want = append(want, fields[1]+" "+fields[2])
		}
	}
	want = append(want, "stdlib v"+strings.TrimPrefix(runtime.Version(), "go"))
	if !slices.Equal(got, want) || len(want) < 20 {
		t.Errorf("got %q, want %q", got, want)
	}
	if n := len(bom.Dependencies[0].DependsOn); n != len(want) {
		t.Errorf("the command depends on %d, want %d", n, len(want))
	}
	if is := bom.Metadata.Component; is.Name != root+"/cmd/tenure" || is.Version != "v0.1.0" || is.Hashes[0].Content != digest(t, binary) {
		t.Errorf("it is the file of %+v", is)
	}
	if bom.BomFormat != "CycloneDX" || bom.SpecVersion != "1.6" || bom.Metadata.Timestamp == "" {
		t.Errorf("it begins with %s", text[:200])
	}
}

// refusesAnyChange checks a release, and that it would be refused if one byte of one file were another.
func refusesAnyChange(t *testing.T, dist string, check func() error) {
	if err := check(); err != nil {
		t.Errorf("the release is refused: %v", err)
	}
	names, err := filepath.Glob(filepath.Join(dist, "*"))
	if err != nil || len(names) != 4 {
		t.Fatalf("there are %s (%v), want 4 files", names, err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		flip := func() {
			data[len(data)/2] ^= 1
			if err := os.WriteFile(name, data, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		flip()
		if check() == nil {
			t.Errorf("%s is accepted with another byte", filepath.Base(name))
		}
		flip()
	}
}

func TestTheSignatureIsOfEachByteOfEachFile(t *testing.T) {
	dist := t.TempDir()
	for _, name := range []string{"tenure-v0.1.0-linux-amd64", "tenure-v0.1.0-linux-amd64.cdx.json"} {
		if err := os.WriteFile(filepath.Join(dist, name), []byte("what is in "+name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	public, key, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := sign(dist, "v0.1.0", key); err != nil {
		t.Fatal(err)
	}
	refusesAnyChange(t, dist, func() error { return verify(dist, public) })
}

// asThePageSays runs the commands with which a reader of SECURITY.md checks a release.
func asThePageSays(dist, commands, public string) error {
	cmd := exec.Command("bash", "-euo", "pipefail", "-c", strings.ReplaceAll(commands, publicKey, public))
	cmd.Dir = dist
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// verify does with a library what the page of releases does with commands.
func verify(dist string, key minisign.PublicKey) error {
	sums, err := os.ReadFile(filepath.Join(dist, "SHA256SUMS"))
	if err != nil {
		return err
	}
	signature, err := os.ReadFile(filepath.Join(dist, "SHA256SUMS.minisig"))
	if err != nil {
		return err
	}
	if !minisign.Verify(key, sums, signature) {
		return errors.New("SHA256SUMS is not what was signed")
	}
	for line := range strings.Lines(string(sums)) {
		sum, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		data, err := os.ReadFile(filepath.Join(dist, name))
		if err != nil {
			return err
		}
		if fmt.Sprintf("%x", sha256.Sum256(data)) != sum {
			return fmt.Errorf("%s has another checksum", name)
		}
	}
	return nil
}

// pageOfReleases returns the commands of SECURITY.md with which a reader checks a release, for this platform. They
// need programs that this machine may not have; then the test is skipped.
func pageOfReleases(t *testing.T) string {
	for _, program := range []string{"minisign", "jq", "sha256sum"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("TENURE_REQUIRE_MINISIGN") != "" {
				t.Fatal(err)
			}
			t.Skipf("the commands of SECURITY.md are not run: %v", err)
		}
	}
	page, err := os.ReadFile(filepath.Join("..", "..", "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?ms)^```sh\n(minisign .*?)^```$").FindSubmatch(page)
	if block == nil {
		t.Fatal("SECURITY.md has no block that begins with minisign")
	}
	return strings.ReplaceAll(string(block[1]), "-linux-amd64", "-"+runtime.GOOS+"-"+runtime.GOARCH)
}

func digest(t *testing.T, name string) string {
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(data))
}

func TestTheKeyOfAReleaseIsReadAndWhatCannotBeReadIsExplained(t *testing.T) {
	name := filepath.Join(t.TempDir(), "minisign.key")
	if _, err := readKey(name); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "CONTRIBUTING.md") {
		t.Errorf("without a key: %v", err)
	}
	_, key, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := key.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	encrypted, err := minisign.EncryptKey("correct", key)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		what, typed string
		text        []byte
		ok          bool
	}{
		{"a key without a password", "", plain, true},
		{"a key with a password", "correct\n", encrypted, true},
		{"no password", "", encrypted, false},
		{"no key", "", []byte("text"), false},
	} {
		if err := os.WriteFile(name, test.text, 0o600); err != nil {
			t.Fatal(err)
		}
		typed, err := os.Create(filepath.Join(t.TempDir(), "stdin"))
		if err != nil {
			t.Fatal(err)
		}
		defer typed.Close()
		if _, err := typed.WriteString(test.typed); err != nil {
			t.Fatal(err)
		}
		if _, err := typed.Seek(0, 0); err != nil {
			t.Fatal(err)
		}
		stdin := os.Stdin
		os.Stdin = typed
		got, err := readKey(name)
		os.Stdin = stdin
		if test.ok != (err == nil) || test.ok && !got.Equal(key) {
			t.Errorf("%s: %v", test.what, err)
		}
	}
}
