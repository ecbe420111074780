package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// platform is one for which a release has a binary of the command.
type platform struct{ os, arch string }

// The command is for Unix systems, so Windows is not among them.
var platforms = []platform{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "amd64"}, {"darwin", "arm64"}}

// build writes the binary of a version, and what it consists of, to the directory dist. The go command
// gets this project's modules from the clone, but builds as it will for everybody once the version is
// published, so anybody can compare the bytes.
func build(temp, clone, dist, version, at string, p platform) error {
	known, err := run(exec.Command("go", "env", "GOMODCACHE", "GOPROXY"))
	if err != nil {
		return err
	}
	cache, upstream, _ := strings.Cut(known, "\n")
	paths := filepath.Join(temp, p.os+"-"+p.arch)
	cmd := exec.Command("go", "install", "-trimpath", root+"/cmd/tenure@"+version)
	cmd.Dir = temp
	cmd.Env = append(os.Environ(), fetchedFrom(clone)...)
	cmd.Env = append(cmd.Env,
		"GOMODCACHE="+filepath.Join(temp, "cache"),
		"GOPROXY=file://"+filepath.ToSlash(filepath.Join(cache, "cache", "download"))+","+upstream,
		"GOPATH="+paths, "GOBIN=", "GOFLAGS=-modcacherw", "GOWORK=off",
		"CGO_ENABLED=0", "GOOS="+p.os, "GOARCH="+p.arch, "GOAMD64=v1", "GOARM64=v8.0")
	if _, err := run(cmd); err != nil {
		return err
	}
	// In bin, or in bin/linux_arm64 if this is another platform.
	built, err := filepath.Glob(filepath.Join(paths, "bin", "tenure"))
	if err == nil && built == nil {
		built, err = filepath.Glob(filepath.Join(paths, "bin", p.os+"_"+p.arch, "tenure"))
	}
	if err != nil || len(built) != 1 {
		return fmt.Errorf("go install left no binary in %s", paths)
	}
	binary, err := os.ReadFile(built[0])
	if err != nil {
		return err
	}
	parts, err := describe(binary, at, p)
	if err != nil {
		return err
	}
	name := filepath.Join(dist, strings.Join([]string{"tenure", version, p.os, p.arch}, "-"))
	if err := os.WriteFile(name, binary, 0o755); err != nil {
		return err
	}
	return os.WriteFile(name+".cdx.json", parts, 0o644)
}

// describe returns the bill of materials of a binary, in CycloneDX's JSON, from what the linker has
// recorded in it. It is the same each time, so it has no serial number, and its time is the release's.
func describe(binary []byte, at string, p platform) ([]byte, error) {
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(binary)
	program, err := component(cdx.ComponentTypeApplication, info.Main)
	if err != nil {
		return nil, err
	}
	program.PackageURL += "?goarch=" + p.arch + "&goos=" + p.os
	program.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}}
	modules, refs := []cdx.Component{}, []string{}
	for _, m := range append(info.Deps, &debug.Module{Path: "stdlib", Version: "v" + strings.TrimPrefix(info.GoVersion, "go")}) {
		c, err := component(cdx.ComponentTypeLibrary, *m)
		if err != nil {
			return nil, err
		}
		modules, refs = append(modules, c), append(refs, c.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: at,
		Authors:   &[]cdx.OrganizationalContact{{Name: "The authors of tenure"}},
		Component: &program,
	}
	bom.Components = &modules
	bom.Dependencies = &[]cdx.Dependency{{Ref: program.BOMRef, Dependencies: &refs}}
	var out bytes.Buffer
	err = cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).EncodeVersion(bom, cdx.SpecVersion1_6)
	return out.Bytes(), err
}

// component describes a module. Its hash is the one in go.sum, as in the files of cyclonedx-gomod.
func component(kind cdx.ComponentType, m debug.Module) (c cdx.Component, err error) {
	if m.Replace != nil || m.Version == "" {
		return c, fmt.Errorf("the binary has %s %s, which is not a published version", m.Path, m.Version)
	}
	purl := "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")
	c = cdx.Component{BOMRef: purl, Type: kind, Name: m.Path, Version: m.Version, PackageURL: purl}
	if sum, ok := strings.CutPrefix(m.Sum, "h1:"); ok {
		hash, err := base64.StdEncoding.DecodeString(sum)
		if err != nil {
			return c, fmt.Errorf("the checksum of %s: %w", m.Path, err)
		}
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(hash)}}
	}
	return c, nil
}
